"""Incremental detokenisation: the text that each token completes."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import Protocol

MAX_UNREAD_TOKENS = 16
"""Maximum tokens held back for an incomplete character; longer ones become U+FFFD, as no byte can complete
them."""


class TokenDecoder(Protocol):
    """Turns one output's token ids into text, a token at a time."""

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes; may be empty."""
        ...

    def finish(self) -> str:
        """Returns the held-back text; incomplete characters become U+FFFD. More tokens may follow."""
        ...


class TokenTable(Protocol):
    """The part of a tokenizer that decoding needs."""

    def is_special(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteDecoder:
    """Decoder for byte-level vocabularies: passes the tokens' bytes through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: TokenTable) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """Decoder for other vocabularies, where a token's text depends on the token before it.

    Text is decoded from ``ids[start:]``, and the text of ``ids[start:read]`` has been returned already. The
    window advances only when its text ends with a complete character, as in Text Generation Inference
    (``Model.decode_token``).

    Args:
        tokenizer: decodes token ids.
        prompt_token_ids: the prompt. Decoders of SentencePiece vocabularies drop the space before the first
            word, so the window begins with the end of the prompt.
    """

    def __init__(self, tokenizer: TokenTable, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # The window, ids[start:].
        self._num_read = 0  # read - start.
        self._told = ""  # decode(ids[start:read])
        for token_id in _tail(tokenizer, prompt_token_ids):
            self.push(token_id)

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id) or not self._tokenizer.token_bytes(token_id):
            # A token without text would only grow the window, which is decoded for every token.
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        is_open = text.endswith("\ufffd") and len(self._ids) - self._num_read < MAX_UNREAD_TOKENS
        if len(text) <= len(self._told) or is_open:
            return ""
        delta = text[len(self._told) :]
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        self._told = self._tokenizer.decode(self._ids)
        return delta

    def finish(self) -> str:
        text = self._tokenizer.decode(self._ids)
        delta = text[len(self._told) :]
        # The window stays: text that follows is not the first of its output.
        self._num_read, self._told = len(self._ids), text
        return delta


def _tail(tokenizer: TokenTable, token_ids: Sequence[int]) -> list[int]:
    """The last tokens that have text, beginning with a whole character.

    Decoding skips special tokens, so an output's first word does not begin the text even if the prompt ends
    with special tokens.
    """
    with_text = (
        token_id
        for token_id in reversed(token_ids)
        if not tokenizer.is_special(token_id) and tokenizer.token_bytes(token_id)
    )
    # Last prompt tokens that decide how an output's text begins. As in vLLM; one character's bytes fit in.
    tail = list(itertools.islice(with_text, 5))[::-1]
    # A partial character would corrupt the bytes after it, since a run of bytes is decoded together.
    return list(itertools.dropwhile(lambda token_id: _continues(tokenizer.token_bytes(token_id)), tail))


def _continues(piece: bytes) -> bool:
    """Whether the piece is a UTF-8 continuation byte."""
    return len(piece) == 1 and 0x80 <= piece[0] < 0xC0
