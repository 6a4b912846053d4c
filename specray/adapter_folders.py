"""Folders of adapters: which names are allowed, and which files are read below one directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from specray.errors import ConfigError, shown

ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
"""Names of an adapter's files."""
ADAPTER_NAME: Final = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
"""Names of adapters, and of their folders."""
CHAT_TEMPLATE_FILES: Final = ("chat_template.jinja", "tokenizer_config.json")
"""Names of the files that may hold a chat template."""
_MAX_TEMPLATE_BYTES: Final = 16 << 20
"""Most bytes of each of these."""
MAX_FILE_BYTES: Final = (1 << 20, 4 << 30)
"""Most bytes of each of an adapter's files."""


def is_adapter_name(name: str) -> bool:
    return re.fullmatch(ADAPTER_NAME, name) is not None and not name.endswith("\n")


def adapter_folder(directory: str | Path, name: str) -> Path:
    """The folder ``name`` of an adapter in ``directory``, all links followed; nothing outside is read.

    Raises:
        ConfigError: the name is not allowed, a link leads out of the directory, or a file is missing, empty
            or too large.
    """
    if not is_adapter_name(name):
        raise ConfigError(
            f"adapter folder {shown(name)} is not allowed; allowed: the name of a folder in the directory of "
            "adapters, 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-', the first no '.'"
        )
    root = Path(directory).resolve()
    folder = (root / name).resolve()
    if folder == root or not folder.is_relative_to(root):
        raise ConfigError(f"adapter folder {name!r} is a link that leads out of the directory of adapters")
    if not folder.is_dir():
        raise ConfigError(f"adapter folder {name!r} is not in the directory of adapters")
    limits = dict(zip(ADAPTER_FILES, MAX_FILE_BYTES, strict=True))
    limits |= {file: _MAX_TEMPLATE_BYTES for file in CHAT_TEMPLATE_FILES if (folder / file).exists()}
    for file, most in limits.items():
        real = (folder / file).resolve()
        if not real.is_relative_to(root):
            raise ConfigError(
                f"adapter folder {name!r}: {file} is a link that leads out of the directory of adapters"
            )
        if not real.is_file():
            raise ConfigError(f"adapter folder {name!r} has no file {file}")
        if not 1 <= (size := real.stat().st_size) <= most:
            raise ConfigError(f"adapter folder {name!r}: {file} has {size} bytes; allowed: 1..{most}")
    return folder
