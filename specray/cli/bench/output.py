"""The results file that every benchmark command writes with ``--json``."""

from __future__ import annotations

import json
from pathlib import Path

from specray.errors import ConfigError


def write_json(values: object, path: Path | None) -> None:
    """Writes results to ``path``, if there is one. Raises ConfigError when the file cannot be written."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None
