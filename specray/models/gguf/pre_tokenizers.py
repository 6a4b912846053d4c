"""The ways in which texts are cut before a byte-level vocabulary's merges, by their names in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping

NAMELESS = "default"
"""Name of the way of a file that names none."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")
"""Capital letters, and small ones; those that are neither are both."""
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*",
)
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = rf"{_WORDS[0]}|{_WORDS[1]}|\p{{N}}|{_OTHERS}"
_GPT4O = rf"{_WORDS[0]}{_ENDING}|{_WORDS[1]}{_ENDING}|\p{{N}}{{1,3}}|{_OTHERS}"
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)

FIRST_WHOLE = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)
"""Ways whose pieces are a token if the vocabulary has them whole, and before whose texts a beginning token
stands where the file does not say."""
COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen", "kormo", "megrez", "qwen35"})
"""Ways of Qwen's own models, whose originals compose characters first (NFC)."""
PATTERNS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (NAMELESS, "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion"),
        (_GPT2,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        ("stablelm2", "hunyuan", "solar-open", "grok-2", "qwen2", "deepseek-r1-qwen", "kormo", "megrez"),
        (_QWEN2,),
    ),
    "qwen35": (_QWEN35,),
    **dict.fromkeys((FIRST_WHOLE - {"tekken"}) | {"dbrx", "smaug-bpe"}, (_LLAMA3,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    "deepseek-coder": _DEEPSEEK_CODER,
}
"""Patterns by which a text is cut, by name, one after the other."""
