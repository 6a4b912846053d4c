"""Incremental detokenisation: what text each token completes."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import Protocol

NUM_TAIL_TOKENS = 5
"""Of a prompt, which tell how its output begins. As many as vLLM takes: one character's bytes fit in."""


MAX_UNREAD_TOKENS = 16
"""Bytes that have not become a character among so many are told as U+FFFD: no later byte will mend them."""


class TokenDecoder(Protocol):
    """Turns one output's token ids into text, a token at a time."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def finish(self) -> str:
        """What was held back; incomplete characters become U+FFFD."""
        ...


class TokenTable(Protocol):
    """What decoding needs of a tokenizer."""

    def is_special(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteDecoder:
    """For byte-level vocabularies: the tokens' bytes through an incremental UTF-8 decoder."""

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
    """For other vocabularies, whose decoding of a token depends on the one before it.

    The text is decoded from ``ids[start:]``, and what ``ids[start:read]`` gave has been told already. The
    window moves on only when its text ends with a complete character. The scheme is that of Text Generation
    Inference (``Model.decode_token``).

    Args:
        tokenizer: what decodes.
        prompt_token_ids: what the output follows. Decoders of SentencePiece vocabularies leave out the space
            before the first word that they see, so the end of the prompt is in the window before the output.
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
            # Without a text. The window would only grow by it, and all of it is decoded for every token.
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
        delta = self._tokenizer.decode(self._ids)[len(self._told) :]
        self._ids, self._num_read, self._told = [], 0, ""
        return delta


def _tail(tokenizer: TokenTable, token_ids: Sequence[int]) -> list[int]:
    """The last tokens that have a text, beginning with a whole character.

    Decoding leaves special tokens out, so after a prompt that ends with some of them an output's first word
    is still not the first of the text.
    """
    with_text = (
        token_id
        for token_id in reversed(token_ids)
        if not tokenizer.is_special(token_id) and tokenizer.token_bytes(token_id)
    )
    tail = list(itertools.islice(with_text, NUM_TAIL_TOKENS))[::-1]
    # The rest of a character would spoil the bytes after it: a run of them is decoded together.
    return list(itertools.dropwhile(lambda token_id: _continues(tokenizer.token_bytes(token_id)), tail))


def _continues(piece: bytes) -> bool:
    """True for a byte of a character other than its first."""
    return len(piece) == 1 and 0x80 <= piece[0] < 0xC0
