"""Loads tokenizers: from tokenizer.json alone if that is complete, else through transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specray.config import EMBEDDED
from specray.demo.paths import demo_target_path
from specray.errors import ConfigError
from specray.json_files import read_json_file
from specray.tokenization.files import check_tokenizer_files
from specray.tokenization.tokenizer import Tokenizer

# Tokenizer classes that use tokenizer.json as it is, without steps of their own.
# Settings of such a class that change what tokenizer.json says.
_CHANGING_KEYS = ("add_bos_token", "add_eos_token", "added_tokens_decoder", "additional_special_tokens")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads a tokenizer from a directory, or from the model hub when there is no such directory.

    ``embedded`` means the tokenizer of the embedded pair. Runs no remote code.

    Raises:
        ConfigError: there is no tokenizer, or it cannot be read.
    """
    path = demo_target_path() if path == EMBEDDED else path
    check_tokenizer_files(path)
    is_local = Path(path).is_dir()
    settings = _read_json(Path(path) / "tokenizer_config.json") if is_local else {}
    if is_local and _is_verbatim(Path(path), settings):
        return _load_verbatim(Path(path), settings)
    return _load_with_transformers(str(path), is_local=is_local)


def read_generation_config(path: str | Path) -> dict[str, Any]:
    """generation_config.json of a model; empty: it has none. Raises ConfigError: unreadable."""
    name = "generation_config.json"
    path = demo_target_path() if path == EMBEDDED else path
    if Path(path).is_dir():
        return _read_json(Path(path) / name)
    from transformers.utils.hub import cached_file

    found = cached_file(str(path), name, _raise_exceptions_for_missing_entries=False)
    return {} if found is None else _read_json(Path(found))


def _is_verbatim(path: Path, settings: Mapping[str, Any]) -> bool:
    return (
        (path / "tokenizer.json").is_file()
        and settings.get("tokenizer_class") == "TokenizersBackend"
        and not any(settings.get(key) for key in _CHANGING_KEYS)
    )


def _load_verbatim(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # The library raises bare Exception for a damaged file.
        raise ConfigError(f"tokenizer {path}: {error}") from None
    special_tokens = {
        key: token
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (token := _token_content(settings.get(key))) is not None
    }
    template_file = path / "chat_template.jinja"
    template = template_file.read_text("utf-8") if template_file.is_file() else settings.get("chat_template")
    eos_token_id = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template=_chat_template(template),
        tool_template=_chat_template(template, "tool_use"),
        eos_token_ids=_eos_token_ids(
            eos_token_id, _read_json(path / "generation_config.json"), _read_json(path / "config.json")
        ),
    )


def _load_with_transformers(source: str, *, is_local: bool) -> Tokenizer:
    from transformers import AutoTokenizer
    from transformers.utils.hub import cached_file

    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            source, local_files_only=is_local, trust_remote_code=False, use_fast=True
        )
    except Exception as error:  # Missing files, unknown classes and damaged files raise all kinds.
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"tokenizer {source} cannot be loaded: {first_line}") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"tokenizer {source} is a {type(loaded).__name__}; allowed: those with a tokenizer.json"
        )
    settings = [
        _read_json(Path(found))
        for name in ("generation_config.json", "config.json")
        if (found := cached_file(source, name, _raise_exceptions_for_missing_entries=False)) is not None
    ]
    return Tokenizer(
        backend,
        special_tokens={key: str(token) for key, token in loaded.special_tokens_map.items()},
        chat_template=_chat_template(loaded.chat_template),
        tool_template=_chat_template(loaded.chat_template, "tool_use"),
        eos_token_ids=_eos_token_ids(loaded.eos_token_id, *settings),
    )


def _eos_token_ids(own: int | None, *settings: Mapping[str, Any]) -> set[int]:
    ids = set() if own is None else {own}
    # Models of text and more have a configuration for each.
    nested = [inner for setting in settings if isinstance(inner := setting.get("text_config"), dict)]
    for setting in (*settings, *nested):
        value = setting.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    return ids


def _chat_template(value: object, name: str = "default") -> str | None:
    """The template of this name; the only one is the default.

    tokenizer_config.json lists several as ``{"name": ..., "template": ...}``; transformers makes it a dict.
    """
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    if isinstance(value, dict):
        value = value.get(name)
    elif name != "default":
        return None
    return value if isinstance(value, str) else None


def _token_content(value: object) -> str | None:
    """A special token of tokenizer_config.json: a string, or a mapping with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = read_json_file(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return values if isinstance(values, dict) else {}
