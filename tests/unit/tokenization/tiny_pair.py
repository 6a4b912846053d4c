"""Two tiny tokenizers that write the same texts: byte-level BPE, and BPE with the marks of SentencePiece."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from specray.tokenization import Tokenizer
from specray.tokenization.partners import SAMPLE_TEXT

BYTE_LEVEL_WORDS = ["Ġthe", "Ġquiet", "Ġmorning", "harbour", "Ġboats", "Ċ", "ĠgetName"]
PIECES = ["▁the", "▁quiet", "▁evening", "harbour", "é", "▁boats", "▁getNames"]


def _merges(words: Iterable[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Merges from left to right for each word; what they make is added to the vocabulary."""
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            pair = word[: end - 1], word[end - 1]
            if pair not in merges:
                merges.append(pair)
            vocabulary.setdefault(word[:end], len(vocabulary))
    return merges


def byte_level_backend(words: Iterable[str] = BYTE_LEVEL_WORDS) -> Backend:
    """Ids 0 and 1 are special; each byte is a token."""
    vocabulary = {"<s>": 0, "<|end|>": 1}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[char] = len(vocabulary)
    merges = _merges(words, vocabulary)
    backend = Backend(BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)])
    return backend


def pieces_backend(pieces: Iterable[str] = PIECES, *, puts_space: bool = False) -> Backend:
    """Ids 0 and 1 are special, then the names of bytes, then characters; ``puts_space`` as in Llama 2."""
    vocabulary = {"<bos>": 0, "<eos>": 1}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for char in sorted(
        {*"▁ABCDEFGHIJKLMNOPQRSTUVWXYZ", *SAMPLE_TEXT.replace(" ", "").replace("\n", ""), "é"}
    ):
        vocabulary[char] = len(vocabulary)
    for piece in pieces:
        for char in piece:
            vocabulary.setdefault(char, len(vocabulary))
    merges = _merges(pieces, vocabulary)
    backend = Backend(BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if puts_space else steps)
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if puts_space else decoding)
    backend.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return backend


def byte_level_tokenizer() -> Tokenizer:
    names = {"bos_token": "<s>", "eos_token": "<|end|>"}
    return Tokenizer(byte_level_backend(), special_tokens=names, eos_token_ids=[1])


def pieces_tokenizer(*, puts_space: bool = False) -> Tokenizer:
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return Tokenizer(pieces_backend(puts_space=puts_space), special_tokens=names, eos_token_ids=[1])


def write_backend(directory: Path, backend: Backend, *, begin: str, end: str) -> int:
    """Writes a tokenizer's files beside a checkpoint; the number of its tokens."""
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", "bos_token": begin, "eos_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return backend.get_vocab_size(with_added_tokens=True)
