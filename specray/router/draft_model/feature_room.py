"""What a draft that reads features is sent of them, and when it can be asked.

It drafts from features of all tokens but the last. They come with verdicts, and go on with the next item;
what one message cannot carry follows in prefill chunks, and rounds go without the draft until then.
"""

from __future__ import annotations

from specray.feature_rows import MAX_FEATURE_BYTES
from specray.router.session.session import Session
from specray.router.transport.links import DraftLink
from specray.types import SpeculateItem


def feature_size(link: DraftLink | None) -> int:
    """Numbers of a row of features that the leased draft reads; 0: it reads none, or there is no draft."""
    return 0 if link is None else link.info.feature_size


def needs_chunk(session: Session) -> bool:
    """Features wait that no question to the draft can bring: more must come, or one message is too small."""
    if session.draft.in_flight is not None or session.features.waiting is None:
        return False
    return not session.has_features or session.features.num_bytes > MAX_FEATURE_BYTES


class FeatureRoom:
    """Shares out the bytes of features of each message to the draft."""

    def __init__(self) -> None:
        self._room = MAX_FEATURE_BYTES
        """Bytes left in the message in the making."""

    def begin(self) -> None:
        self._room = MAX_FEATURE_BYTES

    def fits(self, session: Session) -> bool:
        """The message has room for the features of the session that a chunk would bring."""
        return min(session.features.num_bytes, MAX_FEATURE_BYTES) <= self._room

    def can_ask(self, session: Session) -> bool:
        """The draft has all that it needs with a question."""
        return session.has_features and session.features.num_bytes <= self._room

    def note(self, item: SpeculateItem) -> None:
        if item.features is not None:
            self._room -= len(item.features.data)
