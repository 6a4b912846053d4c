"""Accounts for a tokenizer's keys in a GGUF header: each is read, changes nothing, or refuses the file."""

from __future__ import annotations

from collections.abc import Mapping

from specray.gguf.header import GgufHeader, LongArray, Value
from specray.models.gguf.keys import UnfitError
from specray.models.gguf.pre_tokenizers import NAMELESS, PATTERNS

PREFIX = "tokenizer."
"""Beginning of a tokenizer's keys."""
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
"""Kinds of vocabularies (``ggml.model``): byte-level BPE, and sentencepiece with bytes to fall back on."""
_MODELS = (BYTE_LEVEL, SENTENCEPIECE)

# Read for the tokenizer or for the ends of outputs, or notes for other uses than text: the tokens of
# fill-in-the-middle are in the vocabulary, where clients name them.
_KNOWN = frozenset(
    {
        "chat_template",
        "chat_templates",
        "huggingface.json",
        *(f"ggml.{name}" for name in ("model", "pre", "tokens", "scores", "token_type", "merges")),
        *(f"ggml.add_{name}" for name in ("bos_token", "eos_token", "space_prefix")),
        *(
            f"ggml.{name}_token_id"
            for name in (
                *("bos", "eos", "eot", "eom", "unknown", "separator", "seperator", "padding", "cls", "mask"),
                *("prefix", "suffix", "middle"),
                *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
            )
        ),
    }
)
_NEUTRAL: Mapping[str, Value] = {
    "ggml.add_sep_token": False,
    "ggml.normalizer.lowercase": False,
    "ggml.normalizer.strip_accents": False,
    "ggml.remove_extra_whitespaces": False,
    "ggml.suppress_tokens": (),
    "ggml.token_type_count": 1,
}
"""Values at which a key changes nothing."""


def check_tokenizer(header: GgufHeader) -> None:
    """Raises UnfitError for a tokenizer of another kind, or a key that says something that is not read."""
    values = _values(header)
    model = values.get("ggml.model")
    if model not in _MODELS:
        raise _unfit("ggml.model", model, " or ".join(map(repr, _MODELS)))
    name = values.get("ggml.pre", NAMELESS)
    if model == BYTE_LEVEL and name not in PATTERNS:
        known = ", ".join(sorted(PATTERNS))
        raise _unfit("ggml.pre", name, f"a pre-tokenizer that is known: {known}")
    _check_lists(values, model)
    for key in ("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix"):
        if type(values.get(key, False)) is not bool:
            raise _unfit(key, values[key], "true or false")
    has_space = header.architecture.startswith("gemma") and values.get("ggml.add_space_prefix", False)
    if has_space and model == SENTENCEPIECE:
        # The original's tokenizer puts none before a text.
        raise _unfit("ggml.add_space_prefix", True, "false")
    for key, value in sorted(values.items()):
        if key in _KNOWN or key.startswith("chat_template.") or _NEUTRAL.get(key) == value:
            continue
        allowed = f"{_NEUTRAL[key]!r}" if key in _NEUTRAL else "a file without this key"
        raise _unfit(key, value, f"{allowed}, since it is not read")


def names_no_split(header: GgufHeader) -> bool:
    """Whether a byte-level vocabulary comes without the way in which its texts are cut."""
    values = _values(header)
    return values.get("ggml.model") == BYTE_LEVEL and values.get("ggml.pre", NAMELESS) == NAMELESS


def _values(header: GgufHeader) -> dict[str, Value]:
    return {key.removeprefix(PREFIX): value for key, value in header.values.items() if key.startswith(PREFIX)}


def _check_lists(values: Mapping[str, Value], model: str) -> None:
    """Raises UnfitError where the lists next to the tokens are missing, or of other lengths."""
    count = _length(values.get("ggml.tokens"))
    if model == BYTE_LEVEL and _length(values.get("ggml.merges")) is None:
        raise _unfit("ggml.merges", values.get("ggml.merges"), "a list of merges")
    needed = {"ggml.scores"} if model == SENTENCEPIECE else set()
    for key in sorted(needed | ({"ggml.scores", "ggml.token_type"} & values.keys())):
        if _length(values.get(key)) != count:
            raise _unfit(key, values.get(key), f"a list of {count}, one for each token")


def _length(value: Value | None) -> int | None:
    """Items of a list; None: it is none."""
    if isinstance(value, LongArray):
        return value.count
    return len(value) if isinstance(value, tuple) else None


def _unfit(key: str, value: Value | None, allowed: str) -> UnfitError:
    length = _length(value)
    shown = repr(value) if length is None else f"a list of {length}"
    problem = "is missing" if value is None else f"is {shown}"
    return UnfitError(f"{PREFIX}{key} {problem}; allowed: {allowed}")
