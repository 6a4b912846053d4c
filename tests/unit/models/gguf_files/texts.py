"""Small vocabularies as GGUF files have them, and texts that each way of cutting a text divides otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.unit.models.gguf_files.families import MODELS, TinyModel
from tests.unit.models.tiny_models import ALPHABET

TEXTS = [
    "a's  12 1234\n\n  x(): He'LL",
    "  12ab1 \u00e9\u4e2d1\r\n\tI'm",
    "He a",
    "",
    "a<|end|> a",
]
_MERGES = [
    *("1 2", "12 3", "\u0120 1", "\u0120 \u0120", "\u0120\u0120 \u0120", "' s", "a '", "' L", "'L L"),
    *("\u010a \u010a", "\u0120 x", "x (", ") :", "( )", "\u00c3 \u00a9", "2 a", "a b", "b 1", "\u0120 a"),
]
_WORDS = ["<|start|>", "<|end|>", *ALPHABET, *("".join(merge.split()) for merge in _MERGES)]
# A word that no merges lead to.
_WORDS += ["He"]
_SPACE = "\u2581"
_PIECES = [f"{_SPACE}{_SPACE}", f"{_SPACE}a", "12", "'s", f"{_SPACE}1", "ab", f"a{_SPACE}", "He", "LL"]
_CHARACTERS = sorted(set("".join(TEXTS)) - {" "} | {_SPACE})
_SENTENCE_WORDS = [
    *("<unk>", "<|start|>", "<|end|>"),
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *_PIECES,
    *_CHARACTERS,
]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary, and how it is said to cut texts."""

    family: str
    words: tuple[str, ...]
    settings: Mapping[str, Any]
    """Keys after ``tokenizer.ggml.``."""

    def model(self) -> TinyModel:
        """A model of that vocabulary."""
        tiny = MODELS[self.family]
        header = {**tiny.header, **({"vocab_size": len(self.words)} if "vocab_size" in tiny.header else {})}
        return replace(tiny, config={**tiny.config, "vocab_size": len(self.words)}, header=header)

    def keys(self) -> dict[str, Any]:
        """Keys after ``tokenizer.``."""
        return {f"ggml.{key}": value for key, value in {"tokens": list(self.words), **self.settings}.items()}


def _byte_level(name: str, **settings: Any) -> Vocabulary:
    types = [3, 3, *[1] * (len(_WORDS) - 2)]
    return Vocabulary(
        "llama", tuple(_WORDS), {"pre": name, "merges": _MERGES, "token_type": types, **settings}
    )


def _sentencepiece(family: str, **settings: Any) -> Vocabulary:
    num_pieces = len(_SENTENCE_WORDS) - 259
    return Vocabulary(
        family,
        tuple(_SENTENCE_WORDS),
        {
            "model": "llama",
            "pre": "default",
            "merges": None,
            "scores": [0.0] * 259 + [-float(index) for index in range(num_pieces)],
            "token_type": [2, 3, 3, *[6] * 256, *[1] * num_pieces],
            "unknown_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **settings,
        },
    )


VOCABULARIES = {
    **{
        f"cut-{name}": _byte_level(name)
        for name in ("gpt-2", "smollm", "stablelm2", "qwen2", "qwen35", "llama-bpe", "deepseek-coder")
    },
    "sentence-llama": _sentencepiece("llama"),
    "sentence-llama-without-space": _sentencepiece("llama", add_space_prefix=False),
    "sentence-phi3": _sentencepiece("phi3"),
    "sentence-gemma2": _sentencepiece("gemma2", add_space_prefix=False),
}
"""By name: the pre-tokenizer of a byte-level vocabulary, or the family of one of sentencepiece."""
