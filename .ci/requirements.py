"""Prints what pyproject.toml requires, line by line: of the package, of the named extras, of the build.

pip cannot check hashes while it installs an editable package, so `make setup` installs these first.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def requirements(*extras: str) -> list[str]:
    """Requirements of the package with these extras, and of its build."""
    values = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = values["project"]["optional-dependencies"]
    chosen = [line for extra in extras for line in optional[extra]]
    return [*values["project"]["dependencies"], *chosen, *values["build-system"]["requires"]]


if __name__ == "__main__":
    print("\n".join(requirements(*sys.argv[1:])))
