"""The fingerprint of a tokenizer's vocabulary, by which draft and target know that they mean the same text.

A ``tokenizer.json`` that transformers would take as it is is read without transformers, which takes seconds
to import.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from specray.errors import ConfigError
from specray.gguf.light import WEIGHTS
from specray.json_files import read_json_file
from specray.tokenization.files import check_tokenizer_files

# By tokenizer class: tokens that the class adds where the vocabulary lacks them.
_VERBATIM: dict[str, tuple[str, ...]] = {"TokenizersBackend": (), "PreTrainedTokenizer": ()}
_REBUILT: dict[str, tuple[str, ...]] = {
    "Qwen2Tokenizer": ("<|endoftext|>",),
    "LlamaTokenizer": ("<unk>", "<s>", "</s>"),
}
# By model type: the classes that transformers may choose whatever tokenizer_config.json says.
_MODEL_CLASSES: dict[str, frozenset[str]] = {
    "llama": frozenset({*_VERBATIM, "LlamaTokenizer"}),
    "mistral": frozenset({*_VERBATIM, "LlamaTokenizer"}),
    "qwen2": frozenset({"Qwen2Tokenizer"}),
    "qwen3": frozenset({*_VERBATIM, "Qwen2Tokenizer"}),
}
_OTHER_SOURCES = (
    "auto_map",
    "fast_tokenizer_files",
    "init_inputs",
    "tokenizer_object",
    "gguf_file",
    "merges",
)
"""Keys of tokenizer_config.json with which the vocabulary may come from elsewhere."""


_RECORD = "specray_vocabulary.json"
"""Name of a file that says what follows from the tokenizer.json beside it."""


class ModelVocabulary:
    """A tokenizer's vocabulary, whose tokens are read only where they are asked for.

    Args:
        read: gives ids by token.
        recorded: the fingerprint and the number of token ids; None: they come of the tokens.
    """

    def __init__(self, read: Callable[[], dict[str, int]], recorded: tuple[str, int] | None = None) -> None:
        self._read, self._recorded = read, recorded

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids by token."""
        return self._read()

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.ids) if self._recorded is None else self._recorded[0]

    @cached_property
    def num_token_ids(self) -> int:
        """Token ids up to the last one."""
        return 1 + max(self.ids.values(), default=0) if self._recorded is None else self._recorded[1]


def tokenizer_vocabulary(path: str, directory: Path | None = None) -> ModelVocabulary:
    """The vocabulary of a model; ``directory``: its files on this machine. ConfigError: no tokenizer."""
    local = Path(path).expanduser()
    check_tokenizer_files(local if local.is_dir() else path)

    def read() -> dict[str, int]:
        ids = None if directory is None else read_vocabulary(directory)
        return library_vocabulary(path) if ids is None else ids

    recorded = None if directory is None else _recorded(directory)
    if recorded is not None:
        return ModelVocabulary(read, recorded)
    ids = read()
    return ModelVocabulary(lambda: ids)


def record_vocabulary(directory: Path) -> None:
    """Writes the vocabulary's fingerprint beside a light checkpoint's tokenizer.json, until that is changed.

    To find it takes half a second with 151,936 tokens, in each process of a service.
    """
    vocabulary = tokenizer_vocabulary(str(directory), directory)
    values = vocabulary.fingerprint, vocabulary.num_token_ids, _digest_of_tokenizer(directory)
    (directory / _RECORD).write_text(json.dumps(values) + "\n", encoding="utf-8")


def _recorded(directory: Path) -> tuple[str, int] | None:
    try:
        found, num_token_ids, digest = json.loads((directory / _RECORD).read_text("utf-8"))
        if digest == _digest_of_tokenizer(directory):
            return str(found), int(num_token_ids)
    except (OSError, ValueError, TypeError):
        pass
    return None


def _digest_of_tokenizer(directory: Path) -> str:
    return hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 over the vocabulary sorted by id: two models with the same mean the same text by a token id."""
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token_id}:{token}\n".encode())
    return digest.hexdigest()


def library_vocabulary(path: str) -> dict[str, int]:
    """Ids by token, as transformers reads the tokenizer.

    Raises:
        ConfigError: it cannot.
    """
    from transformers import AutoTokenizer

    local = Path(path).expanduser()
    options: dict[str, Any] = {"local_files_only": True} if local.is_dir() else {}
    where = local if local.is_dir() else path
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
    except Exception as error:  # Damaged files and missing packages raise all kinds.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = f"{type(error).__name__}: {lines[0][:400]}" if lines else type(error).__name__
        raise ConfigError(f"model {path!r} has no tokenizer that can be loaded: {told}") from None
    return dict(tokenizer.get_vocab())


def read_vocabulary(directory: Path) -> dict[str, int] | None:
    """Ids by token; None: transformers may do more with these files than to read them."""
    try:
        settings = _read_json(directory / "tokenizer_config.json")
        file = _read_json(directory / "tokenizer.json")
        if (directory / WEIGHTS).is_symlink():
            return _written_vocabulary(file)
        model = _read_json(directory / "config.json")
        named = list(_named_tokens(directory, settings))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    tokenizer_class = str(settings.get("tokenizer_class")).removesuffix("Fast")
    allowed = _MODEL_CLASSES.get(str(model.get("model_type")), frozenset())
    if tokenizer_class not in allowed or any(settings.get(key) for key in _OTHER_SOURCES):
        return None
    if any(directory.glob("*tekken*")) or (
        tokenizer_class in _REBUILT and not _is_rebuilt_alike(directory, settings, file)
    ):
        return None
    return _read_backend(directory, settings, [*named, *(_VERBATIM | _REBUILT)[tokenizer_class]])


def _written_vocabulary(file: Mapping[str, Any]) -> dict[str, int]:
    """Ids by token of a light checkpoint's tokenizer, which this package has written and reads as it is.

    For 151,936 tokens it takes a third of the time that making the tokenizer does.
    """
    added = {str(token["content"]): int(token["id"]) for token in file["added_tokens"]}
    return {**file["model"]["vocab"], **added}


def _read_backend(directory: Path, settings: Mapping[str, Any], named: list[str]) -> dict[str, int] | None:
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # The library raises bare Exception for a damaged file.
        return None
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    # A padding of the file's own names a token as well.
    if backend.padding is not None:
        named.append(backend.padding["pad_token"])
    # Any other is added, with an id after the last.
    if any(token not in vocabulary for token in named):
        return None
    for token_id, token in (settings.get("added_tokens_decoder") or {}).items():
        if vocabulary.get(token["content"]) != int(token_id):
            return None
    return vocabulary


def _is_rebuilt_alike(directory: Path, settings: Mapping[str, Any], file: Mapping[str, Any]) -> bool:
    """Whether a class that builds the tokenizer anew, from its vocabulary and its added tokens, has the same.

    It adds those that tokenizer_config.json lists, in the order of their ids, as tokenizer.json does.
    """
    if file.get("model", {}).get("type") != "BPE" or (directory / "added_tokens.json").is_file():
        return False
    own = {int(token["id"]): token["content"] for token in file.get("added_tokens", [])}
    listed = settings.get("added_tokens_decoder")
    if listed is None:
        return list(own) == sorted(own)
    return list(own) == sorted(own) and own == {
        int(token_id): token["content"] for token_id, token in listed.items()
    }


def _named_tokens(directory: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    for values in (settings, _read_json(directory / "special_tokens_map.json")):
        for key, value in values.items():
            if key.endswith("_token"):
                yield from _contents([value])
            elif key.endswith("_tokens"):
                yield from _contents(value.values() if isinstance(value, dict) else value or [])
    yield from _read_json(directory / "added_tokens.json")


def _contents(tokens: Any) -> Iterator[str]:
    for token in tokens:
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            yield content


def _read_json(file: Path) -> dict[str, Any]:
    """The object that a file holds; empty where there is none. Raises ValueError for a damaged file."""
    values = read_json_file(file) if file.is_file() else {}
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no object")
    return values
