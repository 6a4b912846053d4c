"""Two tokenizers of one pair: which tokens they share, and how each would write what the other has.

Tokens are compared by their bytes, whatever their vocabularies write for them: ``Ġthe`` of byte-level BPE and
``▁the`` of SentencePiece are the same token, and ``<0xF0>`` is ``ð``.
"""

from __future__ import annotations

import codecs
import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

from specray.tokenization.tokenizer import Tokenizer

SAMPLE_TEXT: Final = (
    "The harbour was quiet on Tuesday morning; only 14 boats had come in, and nobody could say why. "
    '"We waited until 6:30," she told them, "but it didn\'t matter." In general, a method that works for '
    "short texts need not work for long ones, so it's worth testing both.\n\n"
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n"
)
"""Text on which a tokenizer must be able to write what it has read, and on which a draft's share of
probability is measured."""
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Writer:
    """One tokenizer as a writer of bytes.

    Args:
        tokenizer: of a model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids_by_bytes = _ids_by_bytes(tokenizer)
        """Id of each token of ordinary text by its bytes; of several, one that is no single byte by name."""

    @cached_property
    def can_write(self) -> bool:
        token_ids = self.tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False)
        return self.bytes_of(token_ids).strip() == SAMPLE_TEXT.strip().encode()

    def bytes_of(self, token_ids: Iterable[int]) -> bytes:
        """The text of some tokens, which may begin and end within a character."""
        return b"".join(map(self.tokenizer.token_bytes, token_ids))

    def write(self, data: bytes) -> tuple[int, ...]:
        """Tokens of a piece from the middle of a text, as the tokenizer would write it; else byte by byte."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self._write_bytes(data)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.bytes_of(token_ids) != data:
            token_ids = self.tokenizer.encode_inner(text)
        return token_ids if self.bytes_of(token_ids) == data else self._write_bytes(data)

    def _write_bytes(self, data: bytes) -> tuple[int, ...]:
        """Bytes that the vocabulary lacks are left out."""
        found = (self.ids_by_bytes.get(bytes([byte])) for byte in data)
        return tuple(token_id for token_id in found if token_id is not None)


class Partners:
    """How a draft with a tokenizer of its own reads a target's tokens, and what it may propose.

    Args:
        draft, target: their tokenizers.
        sizes: token ids of both models, where their tokenizers may name more.
    """

    def __init__(
        self, draft: Tokenizer, target: Tokenizer, sizes: tuple[int, int] = (sys.maxsize, sys.maxsize)
    ) -> None:
        self._draft, self._target = Writer(draft), Writer(target)
        self._read: dict[int, tuple[int, ...]] = {}
        self._draft_eos = frozenset(draft.eos_token_ids)
        # Of several, the last added one ends a turn of a conversation.
        self._target_eos = max(target.eos_token_ids, default=None)
        self._begin = target.special_id("bos_token"), draft.special_id("bos_token")
        self.begin = _begin(draft)
        """Tokens with which the draft's tokenizer begins a text; models that were trained with them guess
        badly without."""
        pairs = self._same_texts() | self._same_names()
        if self._target_eos is not None and self._target_eos not in pairs:
            free = self._draft_eos.difference(pairs.values())
            pairs |= {self._target_eos: max(free)} if free else {}
        self._num_draft_ids, num_target_ids = sizes
        self.draft_ids: Mapping[int, int] = {
            own: theirs for own, theirs in pairs.items() if own < num_target_ids and theirs < sizes[0]
        }
        """Draft's id by target's id, of tokens that mean the same to both; no two have the same."""

    @property
    def overlap(self) -> str:
        num_ids = self._draft.tokenizer.vocab_size
        return f"{len(self.draft_ids)} of the draft's {num_ids} tokens are the target's as well"

    @property
    def sample_ids(self) -> tuple[int, ...]:
        return self._draft.tokenizer.encode(SAMPLE_TEXT)

    @property
    def can_write(self) -> bool:
        return self._draft.can_write and self._target.can_write

    def read(self, token_id: int) -> tuple[int, ...]:
        """The draft's tokens for one of the target's: its partner, or how the draft writes its text."""
        read = self._read.get(token_id)
        if read is None:
            found = self._find(token_id)
            read = self._read[token_id] = tuple(own for own in found if own < self._num_draft_ids)
        return read

    def write(self, draft_ids: Sequence[int], behind: Sequence[int]) -> tuple[int, ...]:
        """The target's tokens for a text of the draft, after its own last tokens, and perhaps an end."""
        is_special = self._draft.tokenizer.is_special
        kept = tuple(itertools.takewhile(lambda token_id: not is_special(token_id), draft_ids))
        kept = tuple(itertools.takewhile(lambda token_id: token_id not in self._draft_eos, kept))
        data = _whole_characters(self._draft.bytes_of(kept))
        written = self._continue(data, behind) if data else ()
        has_ended = len(kept) < len(draft_ids) and draft_ids[len(kept)] in self._draft_eos
        return written if self._target_eos is None or not has_ended else (*written, self._target_eos)

    def _continue(self, data: bytes, behind: Sequence[int]) -> tuple[int, ...]:
        """The text's tokens where they follow others, with which the target might have joined it."""
        together = self._target.write(self._target.bytes_of(behind) + data)
        if behind and len(together) > len(behind) and together[: len(behind)] == tuple(behind):
            return together[len(behind) :]
        return self._target.write(data)

    def _find(self, token_id: int) -> tuple[int, ...]:
        partner = self.draft_ids.get(token_id)
        if partner is not None:
            return (partner,)
        target = self._target.tokenizer
        begin, own_begin = self._begin
        if token_id == begin:
            return () if own_begin is None else (own_begin,)
        if token_id in target.eos_token_ids and self._draft_eos:
            return (max(self._draft_eos),)
        data = target.token_bytes(token_id)
        own = None if target.is_special(token_id) else self._draft.ids_by_bytes.get(data)
        return self._draft.write(data) if own is None else (own,)

    def _same_texts(self) -> dict[int, int]:
        theirs = self._draft.ids_by_bytes
        return {own: theirs[data] for data, own in self._target.ids_by_bytes.items() if data in theirs}

    def _same_names(self) -> dict[int, int]:
        theirs = self._draft.tokenizer.special_names
        names = self._target.tokenizer.special_names
        return {own: theirs[name] for name, own in names.items() if name in theirs}


def _begin(tokenizer: Tokenizer) -> tuple[int, ...]:
    text = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    places = (place for place in range(len(whole)) if whole[place : place + len(text)] == text)
    return whole[: next(places, 0)]


def _ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    ids: dict[bytes, int] = {}
    # Names of bytes last: they stand for what has no other token.
    for token, token_id in sorted(
        tokenizer.vocabulary.items(), key=lambda item: (_BYTE_PIECE.fullmatch(item[0]) is not None, item[1])
    ):
        data = b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)
        if data and token:
            ids.setdefault(data, token_id)
    return ids


def _whole_characters(data: bytes) -> bytes:
    """Without the bytes of a character at the end that is not whole."""
    try:
        return data[: codecs.utf_8_decode(data, "strict", False)[1]]
    except UnicodeDecodeError:
        return data
