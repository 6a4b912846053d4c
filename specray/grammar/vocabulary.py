"""Shows a model's vocabulary to llguidance, so that text is never written with control tokens.

llguidance tokenizes text that a grammar forces. The model's own tokenizer reads names of added tokens in it
(``<|im_end|>``, ``<tool_call>``) as these tokens, which are no text, and others change characters. Such text
is written in other tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Final, Protocol

from llguidance import LLTokenizer, TokenizerWrapper

_CONTROL: Final = b"\xff"
"""Byte before the names of tokens that are no text, as llguidance has it."""
_MAX_PIECE_LEN: Final = 16
"""Bytes of the longest token with which text is spelled where the tokenizer's own tokens cannot be used."""
_TEXT_BYTES: Final = (*range(0x80), *range(0x80, 0xC0), *range(0xC2, 0xF5))
"""Bytes that occur in UTF-8."""


class ModelTokenizer(Protocol):
    """What a compiler needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of its tokens."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an output."""
        ...

    @property
    def spells_bytes(self) -> bool:
        """Tokens stand for the same bytes wherever they are."""
        ...

    @property
    def control_ids(self) -> frozenset[int]:
        """Tokens that are never text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; the name of a control token; empty for an unknown id."""
        ...

    def encode_inner(self, text: str) -> tuple[int, ...]:
        """Encodes a text that others go before."""
        ...


class TextVocabulary:
    """The vocabulary as bytes, and an encoder of text that writes exactly this text.

    Args:
        vocab_size: width of the model's logits.

    Raises:
        ValueError: what a token writes depends on its neighbours, or there are more tokens than logits.
    """

    def __init__(self, tokenizer: ModelTokenizer, vocab_size: int) -> None:
        if not tokenizer.spells_bytes:
            raise ValueError("its tokens are not bytes of the text")
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(f"vocab size too small; {vocab_size} vs {tokenizer.vocab_size}")
        self._tokenizer = tokenizer
        control = tokenizer.control_ids
        self.tokens = [
            (_CONTROL if token_id in control else b"") + tokenizer.token_bytes(token_id)
            for token_id in range(vocab_size)
        ]
        """Bytes by token id, as ``LLTokenizer`` takes them."""
        self.special_token_ids: tuple[int, ...] = ()
        self.bos_token_id = None

    def backend(self, eos_token_ids: Collection[int]) -> LLTokenizer:
        """The tokenizer of llguidance. Raises ValueError without an end token."""
        if not eos_token_ids:
            raise ValueError("it has no token that ends an output")
        self.eos_token_id = min(eos_token_ids)
        return LLTokenizer(TokenizerWrapper(self), eos_token=list(eos_token_ids))

    def __call__(self, text: str) -> list[int]:
        """Tokens that write the text and nothing else; empty: there are none."""
        data = text.encode()
        token_ids = self._tokenizer.encode_inner(text)
        # Ids may have gaps, and the last ones no logits.
        if b"".join(self.tokens[token_id] for token_id in token_ids if token_id < len(self.tokens)) == data:
            return list(token_ids)
        # Characters of a text that is spelled at once.
        if len(text) <= 32:
            return self._spelled(data)
        half = len(text) // 2
        left, right = self(text[:half]), self(text[half:])
        return [*left, *right] if left and right else []

    def can_write(self, text: str) -> bool:
        return not text or bool(self(text))

    @cached_property
    def writes_all(self) -> bool:
        tokens = set(self.tokens)
        return all(bytes((byte,)) in tokens for byte in _TEXT_BYTES)

    @cached_property
    def _pieces(self) -> dict[bytes, int]:
        """Ids of short tokens by their bytes; the first of several."""
        ids = range(len(self.tokens) - 1, -1, -1)
        return {self.tokens[token_id]: token_id for token_id in ids if self._is_piece(token_id)}

    def _is_piece(self, token_id: int) -> bool:
        token = self.tokens[token_id]
        return 0 < len(token) <= _MAX_PIECE_LEN and not token.startswith(_CONTROL)

    def _spelled(self, data: bytes) -> list[int]:
        """The fewest tokens that write the bytes, long ones first; empty: there are none."""
        best: list[list[int] | None] = [*(None for _ in data), []]
        for start in range(len(data) - 1, -1, -1):
            for end in range(min(len(data), start + _MAX_PIECE_LEN), start, -1):
                rest, token_id = best[end], self._pieces.get(data[start:end])
                if token_id is None or rest is None:
                    continue
                known = best[start]
                if known is None or len(rest) + 1 < len(known):
                    best[start] = [token_id, *rest]
        return best[0] or []
