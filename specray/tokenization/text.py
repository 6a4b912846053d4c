"""The text of one output, cut at its stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specray.interfaces import StopMatcher, StopMatcherFactory
from specray.tokenization.tokenizer import Tokenizer


class TextStream:
    """One output's text as its tokens arrive, up to and without its first stop string.

    A text that may be the beginning of a stop string is held back until the next tokens decide. Of several
    stop strings the one that is complete first counts, and of those the longest; so the result does not
    depend on how the tokens are cut into pushes.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._decoder = tokenizer.decoder()
        self._stop = tuple(stop)
        self._held = ""
        self.stop_reason: str | None = None
        self.num_chars = 0
        """Characters decoded so far, told or held back."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that may be shown now; empty once a stop string was met."""
        told = ""
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            told += self._scan(self._decoder.push(token_id))
        return told

    def finish(self) -> str:
        """What was held back, when no stop string came of it."""
        if self.stop_reason is not None:
            return ""
        rest, self._held = self._held + self._decoder.finish(), ""
        return rest

    def _scan(self, new: str) -> str:
        self.num_chars += len(new)
        if not self._stop or not new:
            return new
        text = self._held + new
        # Whatever was told before cannot begin a stop string, so matches begin in the held text or later.
        matches = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.stop_reason = min(matches)
            self._held = ""
            return text[:start]
        num_held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


class _TextStopMatcher:
    def __init__(self, text: TextStream) -> None:
        self._text = text

    def push(self, token_ids: Sequence[int]) -> str | None:
        self._text.push(token_ids)
        return self._text.stop_reason


def make_stop_matcher(tokenizer: Tokenizer) -> StopMatcherFactory:
    """What the router needs of a tokenizer: where the stop strings of an output are met."""

    def make(stop: Sequence[str]) -> StopMatcher:
        return _TextStopMatcher(TextStream(tokenizer, stop))

    return make


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning, but not the whole, of ``stop``."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
