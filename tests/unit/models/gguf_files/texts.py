"""Small vocabularies as GGUF files have them, and texts that each way of cutting a text divides otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
MERGES = [
    *("1 2", "12 3", "\u0120 1", "\u0120 \u0120", "\u0120\u0120 \u0120", "' s", "a '", "' L", "'L L"),
    *("\u010a \u010a", "\u0120 x", "x (", ") :", "( )", "\u00c3 \u00a9", "2 a", "a b", "b 1", "\u0120 a"),
]
BYTE_WORDS = ["<|start|>", "<|end|>", *ALPHABET, *("".join(merge.split()) for merge in MERGES)]
# A word that no merges lead to.
BYTE_WORDS += ["He"]
_SPACE = "\u2581"
_PIECES = [f"{_SPACE}{_SPACE}", f"{_SPACE}a", "12", "'s", f"{_SPACE}1", "ab", f"a{_SPACE}", "He", "LL"]
_CHARACTERS = sorted(set("".join(TEXTS)) - {" "} | {_SPACE})
SENTENCE_WORDS = [
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


def byte_level(name: str, words: Sequence[str] = BYTE_WORDS, **settings: Any) -> Vocabulary:
    """A byte-level vocabulary whose texts are cut in the way of a name."""
    types = [3, 3, *[1] * (len(words) - 2)]
    keys = {"pre": name, "merges": MERGES, "token_type": types, **settings}
    return Vocabulary("llama", tuple(words), keys)


def sentencepiece(family: str, words: Sequence[str] = SENTENCE_WORDS, **settings: Any) -> Vocabulary:
    """A sentencepiece vocabulary: three control tokens, all bytes, pieces by falling scores."""
    num_pieces = len(words) - 259
    return Vocabulary(
        family,
        tuple(words),
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
        f"cut-{name}": byte_level(name)
        for name in ("gpt-2", "smollm", "stablelm2", "qwen2", "qwen35", "llama-bpe", "deepseek-coder")
    },
    "sentence-llama": sentencepiece("llama"),
    "sentence-llama-without-space": sentencepiece("llama", add_space_prefix=False),
    "sentence-phi3": sentencepiece("phi3"),
    "sentence-gemma2": sentencepiece("gemma2", add_space_prefix=False),
}
"""By name: the pre-tokenizer of a byte-level vocabulary, or the family of one of sentencepiece."""
