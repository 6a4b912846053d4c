"""Keeps text of users apart from control tokens, which only a chat template may write.

Control tokens in strings that a template is given are put between marks. What is rendered is encoded in
pieces, cut at the marks and inside of what is marked, so that no piece holds a control token of a user.
Templates that look for such a text still find it, whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from specray.errors import InvalidRequestError

_START: Final = "\ufdd0"
_END: Final = "\ufdd1"
"""Marks: two characters that Unicode reserves for use inside of programs."""
_MARK: Final = re.compile(f"[{_START}{_END}]")
_ESCAPED: Final = {r"\ufdd0": _START, r"\ufdd1": _END}
"""Marks as a template writes them that escapes what is not ASCII."""


class ControlTokens:
    """The control tokens of one vocabulary.

    Args:
        tokens: their ids by text; those of a single character cannot be cut and do not count.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        known = {token for token in tokens if len(token) > 1}
        self._ids = frozenset(tokens[token] for token in known)
        self._pattern = re.compile(_trie_pattern(known)) if known else None
        self._anywhere = re.compile(f"(?=({_trie_pattern(known)}))") if known else None

    def marked(self, value: Any) -> Any:
        """A string, or all strings of JSON values, with marks around control tokens."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(entry) for entry in value]
        return value

    def pieces(self, rendered: str) -> list[str]:
        """What a template has made of marked strings, in pieces that are encoded apart; none is empty."""
        return [piece for piece in self._pieces(rendered) if piece]

    def check(self, pieces: Sequence[str], token_ids: Sequence[int]) -> None:
        """Raises InvalidRequestError if more control tokens were read than the pieces spell."""
        num_spelled = sum(self._count(piece) for piece in pieces)
        if sum(map(self._ids.__contains__, token_ids)) > num_spelled:
            raise InvalidRequestError(
                "messages: the tokenizer would read text of a message as a control token; "
                "allowed: other characters",
                field="messages",
            )

    def _marked(self, text: str) -> str:
        # Marks of a user would mark what he likes.
        text = _MARK.sub("", text)
        if self._pattern is None or not self._pattern.search(text):
            return text
        told, parts = 0, list[str]()
        for start, end in _clusters(self._spans(text)):
            parts += [text[told:start], _START, text[start:end], _END]
            told = end
        return "".join([*parts, text[told:]])

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where control tokens stand in a text, also where they overlap."""
        if self._anywhere is not None:
            for match in self._anywhere.finditer(text):
                yield match.start(), match.end(1)

    def _count(self, piece: str) -> int:
        return sum(1 for _ in self._pattern.finditer(piece)) if self._pattern is not None else 0

    def _pieces(self, rendered: str) -> Iterator[str]:
        for escaped, mark in _ESCAPED.items():
            rendered = rendered.replace(escaped, mark)
        told, is_marked = 0, False
        for match in _MARK.finditer(rendered):
            text, told = rendered[told : match.start()], match.end()
            # A mark that lost its partner in the template marks nothing, but still cuts.
            yield from self._cut(text) if is_marked and match[0] == _END else [text] if text else []
            is_marked = match[0] == _START
        if told < len(rendered):
            yield rendered[told:]

    def _cut(self, text: str) -> Iterator[str]:
        told = 0
        for start, _ in self._spans(text):
            yield text[told : start + 1]
            told = start + 1
        if told < len(text):
            yield text[told:]


def without_marks(rendered: str) -> str:
    return _MARK.sub("", rendered)


def _clusters(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first: tuple[int, int] | None = None
    for start, end in spans:
        if first is not None and start < first[1]:
            first = (first[0], max(first[1], end))
            continue
        if first is not None:
            yield first
        first = (start, end)
    if first is not None:
        yield first


def _trie_pattern(words: Iterable[str]) -> str:
    """A pattern of all words, longer ones first, that reads each character once."""
    by_first: dict[str, list[str]] = {}
    is_end = False
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
        else:
            is_end = True
    if not by_first:
        return ""
    branches = [re.escape(first) + _trie_pattern(rests) for first, rests in sorted(by_first.items())]
    return f"(?:{'|'.join(branches)}){'?' if is_end else ''}"
