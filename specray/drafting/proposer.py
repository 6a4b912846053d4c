"""What every model-free draft is for one session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specray.drafting.ngram import NgramProposer
from specray.drafting.store import OutputStore
from specray.drafting.suffix import SuffixProposer
from specray.types import DraftKind


class SessionProposer(Protocol):
    """Proposes what may follow one session's tokens. Synchronous; microseconds per token and call."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it was given."""
        ...

    @property
    def match_len(self) -> int:
        """Of the session's last tokens, how many stood before something that may follow; at least up to
        LONG_MATCH_LEN.
        """
        ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes the session's next committed tokens: prompt first, then what was verified."""
        ...

    def propose(self, k: int) -> tuple[int, ...]:
        """At most ``k`` tokens to verify after all that it was given; empty: nothing comes to mind."""
        ...


def make_proposer(kind: DraftKind, store: OutputStore | None = None) -> SessionProposer:
    """A proposer for a new session.

    Args:
        kind: one without a model.
        store: past outputs that it may propose from; only ``suffix`` uses them.
    """
    assert kind is not DraftKind.MODEL
    return NgramProposer() if kind is DraftKind.NGRAM else SuffixProposer(store=store)
