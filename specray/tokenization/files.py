"""What the files of a tokenizer say before it is read: what is missing, and whether its model chats."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specray.adapter_folders import CHAT_TEMPLATE_FILES
from specray.errors import ConfigError
from specray.json_files import check_settings, read_json_file

_READ = ("tokenizer.json", "vocab.json", "vocab.txt")
"""Files of which one suffices, or does with others next to it."""
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model")


def check_tokenizer_files(path: str | Path) -> None:
    """Raises ConfigError for a tokenizer in a form that is not read here, and for settings beyond all bounds.

    Args:
        path: of a directory; a hub id is left to the library.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        return
    check_settings(directory)
    if any((directory / name).is_file() for name in _READ):
        return
    found = next((name for name in _SENTENCEPIECE if (directory / name).is_file()), None)
    if found is not None and find_spec("sentencepiece") is None:
        raise ConfigError(
            f"model {str(path)!r} has its tokenizer in {found} alone, which needs the package sentencepiece, "
            "not installed here; allowed: to install it (pip install sentencepiece), or a tokenizer.json"
        )
    tekken = sorted(file.name for file in directory.glob("*tekken*.json"))
    if found is None and tekken:
        raise ConfigError(
            f"model {str(path)!r} has its tokenizer in {tekken[0]} alone, which only the package "
            "mistral-common reads, not this service; allowed: a tokenizer.json"
        )


def has_chat_template(path: str | Path) -> bool:
    """Whether the files of a model have a chat template; of a hub id, those in the hub's cache."""
    return bool(stored_chat_template(path))


def stored_chat_template(path: str | Path) -> Any:
    """The chat template in the files of a model or an adapter: text, or a list of some; None: none."""
    template, settings = (_file(path, name) for name in CHAT_TEMPLATE_FILES)
    try:
        if template is not None:
            return template.read_text().strip()
        found = None if settings is None else read_json_file(settings).get("chat_template")
        return found.strip() if isinstance(found, str) else found
    except (OSError, ValueError, AttributeError):
        return None


def _file(path: str | Path, name: str) -> Path | None:
    """A file of a model; None: it is not on this machine."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory / name if (directory / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(str(path), name)
    except ValueError:  # The text is no hub id.
        return None
    return Path(found) if isinstance(found, str) else None
