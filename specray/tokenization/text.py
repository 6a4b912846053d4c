"""Text of one output, cut at its stop strings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from specray.interfaces import StopMatcher, StopMatcherFactory
from specray.requests import TextOptions
from specray.tokenization.tokenizer import Tokenizer

_FIRST_MARK = 0xD800
_LAST_MARK = 0xDFFF
"""Marks are lone surrogates: decoded text has none."""
_MARKS = re.compile("[\ud800-\udfff]")


class SpecialMarks:
    """The marks of one output's special tokens.

    Args:
        tokenizer: knows which tokens are special.
        options: say which special tokens are text for the reader; the others can end an output, but are not
            seen.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._by_id: dict[int, str] = {}
        self._texts: dict[str, str] = {}
        """What the reader sees of each mark."""

    def is_shown(self, token_id: int) -> bool:
        return not self._options.skip_special_tokens or token_id in self._options.shown_token_ids

    def encoded(self, text: str) -> str:
        """Text with a mark in place of every special token that is written in it, the longest first."""
        if self._tokenizer.special_initials.isdisjoint(text):
            return text
        names = self._tokenizer.special_names
        found = [name for name in names if name in text]
        if not found:
            return text
        pattern = "|".join(re.escape(name) for name in sorted(found, key=len, reverse=True))
        return re.sub(pattern, lambda match: self._make(names[match[0]]), text)

    def mark(self, token_id: int) -> str:
        """Mark of a special token; empty for one that is neither shown nor part of a stop string."""
        known = self._by_id.get(token_id)
        if known is not None or not self.is_shown(token_id):
            return known or ""
        return self._make(token_id)

    def text(self, marked: str) -> str:
        """What the reader sees of marked text."""
        if not self._texts or marked.isascii():
            return marked
        return _MARKS.sub(lambda match: self._texts[match[0]], marked)

    def _make(self, token_id: int) -> str:
        known = self._by_id.get(token_id)
        if known is not None:
            return known
        name = self._tokenizer.token_bytes(token_id).decode()
        code = _FIRST_MARK + len(self._texts)
        if code > _LAST_MARK:
            return name  # After 2048 different ones: as plain text.
        self._by_id[token_id] = mark = chr(code)
        self._texts[mark] = name if self.is_shown(token_id) else ""
        return mark


class TextStream:
    """One output's text as its tokens arrive, up to and without its first stop string.

    Text that may begin a stop string is held back until later tokens decide. The stop string that is complete
    first counts, and of those the longest, so the result does not depend on how tokens are split into pushes.
    A stop string that is complete within the first ``min_tokens`` tokens is ordinary text. The text may
    depend on the end of the prompt.

    A special token is one piece: a stop string may be its text, or contain it, but does not match a part of
    it. That holds whether special tokens are shown or not, so routers need not know.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        prompt_token_ids: Sequence[int] = (),
        min_tokens: float = 0,
        options: TextOptions | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder(prompt_token_ids)
        self._options = options or TextOptions()
        self._marks = SpecialMarks(tokenizer, self._options)
        self._stop = tuple((self._marks.encoded(entry), entry) for entry in stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self.stop_reason: str | None = None
        self.passed: list[str] = []
        """Stop strings that were complete within the first ``min_tokens`` tokens."""
        self.num_chars = 0
        """Characters decoded so far, returned or held back."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Returns the text that can be shown now; empty after a stop string."""
        told = ""
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self._num_tokens += 1
            told += self._scan(self._decoded(token_id))
        return told

    def finish(self) -> str:
        """Returns the held-back text; empty after a stop string."""
        if self.stop_reason is not None:
            return ""
        rest, self._held = self._held + self._decoder.finish(), ""
        return self._marks.text(rest)

    def _decoded(self, token_id: int) -> str:
        if not self._tokenizer.is_special(token_id):
            return self._decoder.push(token_id)
        mark = self._marks.mark(token_id)
        # What is shown stands after the text before it, complete or not.
        return self._decoder.finish() + mark if self._marks.is_shown(token_id) else mark

    def _scan(self, new: str) -> str:
        self.num_chars += len(self._marks.text(new))
        if not self._stop or not new:
            return self._marks.text(new)
        # Returned text cannot begin a stop string, so matches begin in the held-back text or later.
        told, text = "", self._held + new
        while (match := self._first_match(text)) is not None:
            end, start, stop = match
            if self._num_tokens > self._min_tokens:
                self._held, self.stop_reason = "", stop
                ending = stop if self._options.include_stop else ""
                return self._marks.text(told + text[:start]) + ending
            self.passed.append(stop)
            told, text = told + text[:end], text[end:]
        num_held = max(_overlap(text, coded) for coded, _ in self._stop)
        self._held = text[len(text) - num_held :]
        return self._marks.text(told + text[: len(text) - num_held])

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """End, start and stop string of the match that is complete first, and of those the longest."""
        matches = [
            (start + len(coded), start, stop)
            for coded, stop in self._stop
            if (start := text.find(coded)) >= 0
        ]
        return min(matches, default=None)


class _TextStopMatcher:
    def __init__(self, text: TextStream) -> None:
        self._text = text

    def push(self, token_ids: Sequence[int]) -> str | None:
        num_before = len(self._text.passed)
        self._text.push(token_ids)
        return self._text.passed[num_before] if len(self._text.passed) > num_before else None


def make_stop_matcher(tokenizer: Tokenizer) -> StopMatcherFactory:
    """Makes the factory of stop matchers for the router, which find tokens that complete a stop string.

    The router decides whether a match counts (``min_tokens``), so a matcher continues after one.
    """

    def make(stop: Sequence[str], prompt_token_ids: Sequence[int]) -> StopMatcher:
        text = TextStream(tokenizer, stop, prompt_token_ids=prompt_token_ids, min_tokens=math.inf)
        return _TextStopMatcher(text)

    return make


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
