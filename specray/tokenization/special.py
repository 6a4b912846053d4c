"""Special tokens within text that is searched: each is one character that no text contains."""

from __future__ import annotations

import re

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
        """Whether the reader sees the token."""
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
