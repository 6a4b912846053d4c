"""Models of the Hugging Face hub, downloaded ahead of their first use into the hub's own cache."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from specray.errors import ConfigError

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
"""An id with its owner."""
_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")


def fetch_from_hub(hub_id: str, *, endpoint: str | None = None) -> Path:
    """Downloads a model without its other formats; its directory. ConfigError: no hub, or no such model."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        directory = Path(snapshot_download(hub_id, allow_patterns=list(_FILES), endpoint=endpoint))
    except Exception as error:  # No network, no such repository, no permission: each raises its own kind.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise ConfigError(f"the hub gives no {hub_id}: {lines[0][:300]}") from None
    if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
        raise ConfigError(f"{hub_id} has no config.json with *.safetensors; other formats are not fetched")
    return directory
