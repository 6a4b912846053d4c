"""Paths of the weights inside the installed package."""

from importlib import resources
from pathlib import Path


def demo_target_path() -> Path:
    """Returns the directory of the embedded target checkpoint (config, weights, tokenizer)."""
    return _package_directory() / "target"


def demo_draft_path() -> Path:
    """Returns the directory of the embedded draft checkpoint (config, weights, tokenizer)."""
    return _package_directory() / "draft"


def smollm2_draft_path() -> Path:
    """Returns the directory of the compact draft for SmolLM2-135M-Instruct."""
    return _package_directory() / "smollm2_draft"


def _package_directory() -> Path:
    return Path(str(resources.files("specray.demo")))
