"""Writes the files of a tokenizer from a GGUF header: tokenizer.json, its settings, and the chat template.

Neither transformers nor torch is needed. The files are those that ``specray.tokenization`` reads as they are.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specray.gguf.header import GgufHeader, Value, read_header
from specray.models.gguf.keys import UnfitError
from specray.models.gguf.pre_tokenizers import COMPOSED, FIRST_WHOLE, NAMELESS, PATTERNS
from specray.models.gguf.tokenizer import BYTE_LEVEL, PREFIX, SENTENCEPIECE
from specray.tokenization.byte_alphabet import spelled_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Merge = tuple[str, str]
_LISTS = tuple(f"{PREFIX}ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))
_ROLES: Mapping[str, str] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""Key in a file of each special token, by its name in a tokenizer's settings."""
_CONTROL, _USER_DEFINED = 3, 4
"""Numbers of types of tokens in GGUF."""
_ALWAYS_SPECIAL: Mapping[str, tuple[str, ...]] = {
    BYTE_LEVEL: ("<|endoftext|>",),
    SENTENCEPIECE: ("<unk>", "<s>", "</s>"),
    "gemma": ("<unk>", "<bos>", "<eos>", "<pad>", "<mask>"),
}
"""Tokens that are special whatever the file says, by kind of vocabulary."""
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class WrittenTokenizer:
    """What was written, by which the ends of outputs are found."""

    vocabulary: dict[str, int]
    """Ids by token."""
    special_ids: frozenset[int]
    """Tokens that are no text."""


def write_tokenizer(path: Path, destination: Path) -> WrittenTokenizer:
    """Writes the tokenizer of a GGUF file whose header ``check_tokenizer`` has found fit.

    Args:
        destination: an existing directory.

    Raises:
        UnfitError: the vocabulary contradicts itself, as with a merge of tokens that it does not have.
    """
    header = read_header(path, whole=_LISTS)
    source = _Source(header)
    make = _byte_level if source.kind == BYTE_LEVEL else _sentencepiece
    tokenizer, tokens = make(source)
    special = source.special_tokens
    _add(tokenizer, special, source.whole_tokens)
    roles = source.roles()
    tokenizer.post_processor = _framed(source, roles, tokenizer)
    tokenizer.save(str(destination / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False, **roles}
    _write_json(destination / "tokenizer_config.json", settings)
    template = header.values.get(f"{PREFIX}chat_template")
    if isinstance(template, str) and template:
        (destination / "chat_template.jinja").write_bytes(template.encode())
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    return WrittenTokenizer(vocabulary, frozenset(vocabulary[token] for token in special))


def _add(tokenizer: Tokenizer, special: Sequence[str], whole: Sequence[str]) -> None:
    """Lets tokens be found in a text before it is cut; those of a vocabulary that spells them otherwise, as
    Gemma's spaces, are found by merges."""
    from tokenizers import AddedToken

    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    known = (token for token in whole if tokenizer.token_to_id(token) is not None)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in known])


class _Source:
    """A header's tokenizer."""

    def __init__(self, header: GgufHeader) -> None:
        self._values = {
            key.removeprefix(f"{PREFIX}ggml."): value
            for key, value in header.values.items()
            if key.startswith(f"{PREFIX}ggml.")
        }
        self.kind = str(self._values["model"])
        self.is_gemma = header.architecture.startswith("gemma")
        self.is_qwen = header.architecture.startswith("qwen")
        self.tokens: list[str] = list(self._list("tokens"))
        self._types = self._list("token_type")
        self.cut_name = str(self._values.get("pre", NAMELESS))

    def _list(self, name: str) -> tuple[Any, ...]:
        found = self._values.get(name, ())
        return found if isinstance(found, tuple) else ()

    def get(self, name: str, default: Value) -> Value:
        return self._values.get(name, default)

    def roles(self) -> dict[str, str]:
        """Special tokens by role."""
        ids = {role: self._values.get(key) for role, key in _ROLES.items()}
        return {role: self._token(token_id) for role, token_id in ids.items() if token_id is not None}

    def _token(self, token_id: Value) -> str:
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise UnfitError(f"a special token has the id {token_id!r}; allowed: 0 to {len(self.tokens) - 1}")
        return self.tokens[token_id]

    @functools.cached_property
    def special_tokens(self) -> list[str]:
        """Tokens that are no text, each once: control tokens, those with a role, and those of the kind."""
        known = set(self.tokens)
        kind = "gemma" if self.is_gemma and self.kind == SENTENCEPIECE else self.kind
        usual = (token for token in _ALWAYS_SPECIAL[kind] if token in known)
        return list(dict.fromkeys((*self._of_type(_CONTROL), *usual, *self.roles().values())))

    @functools.cached_property
    def whole_tokens(self) -> list[str]:
        """Tokens that are text, and are found in a text before it is cut."""
        special = set(self.special_tokens)
        return [token for token in self._of_type(_USER_DEFINED) if token not in special]

    @property
    def raw_tokens(self) -> set[str]:
        """Tokens that are spelled as text also in a byte-level vocabulary."""
        return {*self.special_tokens, *self.whole_tokens}

    def _of_type(self, number: int) -> Iterator[str]:
        pairs = zip(self.tokens, self._types, strict=False)
        return (token for token, kind in pairs if kind == number)

    def merges(self, tokens: list[str]) -> list[Merge]:
        """The file's own merges, or those that follow from the scores; Gemma's follow from the order."""
        if "merges" not in self._values:
            scores = [-index for index in range(len(tokens))] if self.is_gemma else self._list("scores")
            return derived_merges(tokens, scores)
        pairs = [tuple(str(merge).split(" ")) for merge in self._list("merges")]
        for index, pair in enumerate(pairs):
            if len(pair) != 2:
                merge = self._list("merges")[index]
                raise UnfitError(
                    f"{PREFIX}ggml.merges has {merge!r}; allowed: two tokens with a space between"
                )
        return [(left, right) for left, right in pairs]


def _byte_level(source: _Source) -> tuple[Tokenizer, list[str]]:
    """The tokenizer without added tokens, and the tokens as it spells them."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    raw, spelling = source.raw_tokens, spelled_bytes()
    alphabet = set(spelling)
    tokens = [
        token
        if token in raw or alphabet.issuperset(token)
        else "".join(spelling[byte] for byte in token.encode())
        for token in source.tokens
    ]
    is_first_whole = source.cut_name in FIRST_WHOLE
    tokenizer = Tokenizer(_bpe(tokens, source.merges(tokens), ignore_merges=is_first_whole))
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PATTERNS[source.cut_name]
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if source.is_qwen and source.cut_name in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, tokens


def _sentencepiece(source: _Source) -> tuple[Tokenizer, list[str]]:
    """The tokenizer of a sentencepiece vocabulary, and its tokens by id.

    Spaces are written as sentencepiece does; but in Gemma's one more stands before each text and after each
    control token, unless the file says otherwise.
    """
    from tokenizers import Tokenizer, decoders, normalizers

    tokens = [_with_marks(token) for token in source.tokens] if source.is_gemma else source.tokens
    unknown = source.roles().get("unk_token")
    merges = source.merges(tokens)
    tokenizer = Tokenizer(_bpe(tokens, merges, fuse_unk=True, byte_fallback=True, unk_token=unknown))
    has_prefix = not source.is_gemma and bool(source.get("add_space_prefix", True))
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    cut = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *cut]
    )
    return tokenizer, tokens


def _with_marks(token: str) -> str:
    """Gemma's files hold spaces in tokens that have nothing else."""
    return _SPACE * len(token) if " " in token and not token.strip() else token


def _bpe(tokens: list[str], merges: list[Merge], **options: Any) -> Any:
    from tokenizers.models import BPE

    try:
        return BPE({token: token_id for token_id, token in enumerate(tokens)}, merges, **options)
    except Exception as error:  # The library raises bare Exception.
        raise UnfitError(f"{PREFIX}ggml.merges cannot be used: {str(error)[:200]}") from None


def _framed(source: _Source, roles: Mapping[str, str], tokenizer: Tokenizer) -> Any:
    """Puts before and after a text what llama.cpp puts there."""
    from tokenizers import processors

    is_usual = source.kind == SENTENCEPIECE or source.cut_name in FIRST_WHOLE
    bos = roles.get("bos_token") if source.get("add_bos_token", is_usual) else None
    eos = roles.get("eos_token") if source.get("add_eos_token", False) else None
    ends = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]

    def template(letter: str, number: int) -> list[str]:
        parts = (bos, letter, eos)
        return [f"{part}:{number}" for part in parts if part is not None]

    single = template("$A", 0)
    return processors.TemplateProcessing(
        single=single, pair=[*single, *template("$B", 1)], special_tokens=ends
    )


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def derived_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[Merge]:
    """The merges of a sentencepiece vocabulary, which lists none: they follow from pieces and scores.

    Merges of two pieces to one are in the order in which they are made: of the piece with the highest score
    first, then those with the longest left, then right, part.
    """
    known = set(tokens)
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in dict(zip(tokens, scores, strict=True)).items():
        for end in range(1, len(token)):
            left, right = token[:end], token[end:]
            if left in known and right in known:
                found.append((score, len(left), len(right), left, right))
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [(left, right) for *_, left, right in found]
