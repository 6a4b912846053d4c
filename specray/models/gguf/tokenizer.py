"""Accounts for a tokenizer's keys in a GGUF header, and does what transformers leaves out of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specray.gguf.header import GgufHeader, LongArray, Value
from specray.models.gguf.keys import UnfitError

_PREFIX = "tokenizer."
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_MODELS = (_BYTE_LEVEL, _SENTENCEPIECE)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OWN_SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("default", "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion"),
        (_GPT2,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), (_QWEN2,)),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
}
"""Patterns by which a text is cut, one after the other, by the name of the pre-tokenizer."""
_FIRST_WHOLE = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)
"""Pre-tokenizers whose pieces are a token if the vocabulary has them whole, and before whose texts a
beginning token stands where the file does not say."""
LIBRARY_SPLITS = _FIRST_WHOLE | {
    "dbrx",
    "smaug-bpe",
    "qwen2",
    "deepseek-r1-qwen",
    "kormo",
    "megrez",
    "qwen35",
    "gpt-4o",
    "llama4",
    "kanana2",
    "minimax-m2",
}
"""Pre-tokenizers that transformers knows."""

# Read by transformers or for the ends of outputs, or notes for other uses than text: the tokens of
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
    name = values.get("ggml.pre", "default")
    if model == _BYTE_LEVEL and name not in _OWN_SPLITS and name not in LIBRARY_SPLITS:
        known = ", ".join(sorted({*_OWN_SPLITS, *LIBRARY_SPLITS}))
        raise _unfit("ggml.pre", name, f"a pre-tokenizer that is known: {known}")
    _check_lists(values, model)
    for key in ("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix"):
        if type(values.get(key, False)) is not bool:
            raise _unfit(key, values[key], "true or false")
    has_space = header.architecture.startswith("gemma") and values.get("ggml.add_space_prefix", False)
    if has_space and model == _SENTENCEPIECE:
        # Its tokenizer in transformers puts none before a text.
        raise _unfit("ggml.add_space_prefix", True, "false")
    for key, value in sorted(values.items()):
        if key in _KNOWN or key.startswith("chat_template.") or _NEUTRAL.get(key) == value:
            continue
        allowed = f"{_NEUTRAL[key]!r}" if key in _NEUTRAL else "a file without this key"
        raise _unfit(key, value, f"{allowed}, since it is not read")


def names_no_split(header: GgufHeader) -> bool:
    """Whether a byte-level vocabulary comes without the way in which its texts are cut."""
    values = _values(header)
    return values.get("ggml.model") == _BYTE_LEVEL and values.get("ggml.pre", "default") == "default"


def complete_tokenizer(tokenizer: Any, header: GgufHeader) -> None:
    """Cuts texts as the file's pre-tokenizer does, and puts before them what llama.cpp puts there."""
    values = _values(header)
    name = str(values.get("ggml.pre", "default"))
    if values["ggml.model"] == _SENTENCEPIECE:
        if not header.architecture.startswith("gemma"):
            _space_out(
                tokenizer.backend_tokenizer, has_prefix=bool(values.get("ggml.add_space_prefix", True))
            )
        return
    if name in _OWN_SPLITS:
        from tokenizers import Regex, pre_tokenizers

        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _OWN_SPLITS[name]]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if name in _FIRST_WHOLE:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        if "ggml.add_bos_token" not in values and tokenizer.bos_token is not None:
            tokenizer.add_bos_token = True


def _space_out(backend: Any, *, has_prefix: bool) -> None:
    """Writes spaces as sentencepiece does, and one more before each text and after each control token."""
    from tokenizers import decoders, normalizers

    space = "\u2581"
    steps = [normalizers.Prepend(space)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", space)])
    backend.pre_tokenizer = None
    cut = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *cut]
    )


def _values(header: GgufHeader) -> dict[str, Value]:
    return {
        key.removeprefix(_PREFIX): value for key, value in header.values.items() if key.startswith(_PREFIX)
    }


def _check_lists(values: Mapping[str, Value], model: str) -> None:
    """Raises UnfitError where the lists next to the tokens are missing, or of other lengths."""
    count = _length(values.get("ggml.tokens"))
    if model == _BYTE_LEVEL and _length(values.get("ggml.merges")) is None:
        raise _unfit("ggml.merges", values.get("ggml.merges"), "a list of merges")
    needed = {"ggml.scores"} if model == _SENTENCEPIECE else set()
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
    return UnfitError(f"{_PREFIX}{key} {problem}; allowed: {allowed}")
