"""Writes constraints.txt: a pin of each package that `make` and CI install, with the hashes of its archives.

`make lock` keeps the present versions and adds what pyproject.toml newly requires; `make lock UPGRADE=1`
takes the newest versions. Packages are resolved twice: as pip is configured here, and from PyPI alone, whose
torch needs packages that a CPU build does not. The hashes are of wheels for CPython 3.11 and 3.12 on Linux
and macOS, of source archives where a package has no such wheel, and of the archives that pip would take here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version
from requirements import ROOT, requirements

_CONSTRAINTS = ROOT / "constraints.txt"
_INDEX = "https://pypi.org/simple"
_HEADER = "# Pins and hashes for make and CI; users get the bounds of pyproject.toml. Written by: make lock\n"
_INTERPRETERS = {"py3", "cp311", "cp312"}
_PLATFORMS = ("any", "x86_64", "aarch64", "macosx")
_TIMEOUT_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    kept = {} if parser.parse_args().upgrade else _pins()
    from_pypi = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_INDEX_URL": _INDEX}
    chosen: dict[str, tuple[str, set[str]]] = {}
    for environment in ({}, from_pypi):
        pins = kept | {name: version for name, (version, _) in chosen.items()}
        for name, version, digest in _resolve(pins, environment):
            chosen.setdefault(name, (version, set()))[1].add(digest)
    with ThreadPoolExecutor(8) as pool:
        listed = pool.map(lambda item: _listed(item[0], item[1][0]), chosen.items())
        lines = [
            f"{name}=={version} "
            + " ".join(f"--hash=sha256:{digest}" for digest in sorted(own | more))
            + "\n"
            for (name, (version, own)), more in zip(chosen.items(), listed, strict=True)
        ]
    _CONSTRAINTS.write_text(_HEADER + "".join(sorted(lines)))


def _pins() -> dict[str, str]:
    lines = (line.split()[0] for line in _CONSTRAINTS.read_text().splitlines() if "==" in line)
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def _resolve(pins: dict[str, str], environment: dict[str, str]) -> list[tuple[str, str, str]]:
    """Name, version without its local part, and SHA-256 of each archive that pip would install."""
    with tempfile.TemporaryDirectory() as directory:
        constraints, report = Path(directory) / "pins.txt", Path(directory) / "report.json"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(report), "--constraint", str(constraints), "pip", *requirements("dev")]
        subprocess.run(command, check=True, env=os.environ | environment, timeout=_TIMEOUT_S)
        installed: list[Any] = json.loads(report.read_text())["install"]
    return [
        (
            canonicalize_name(item["metadata"]["name"]),
            Version(item["metadata"]["version"]).public,
            item["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for item in installed
    ]


def _listed(name: str, version: str) -> set[str]:
    """SHA-256 of a version's archives in the index."""
    accepted = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(f"{_INDEX}/{name}/", headers=accepted)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        files = {item["filename"]: item["hashes"]["sha256"] for item in json.load(answer)["files"]}
    wheels = {digest for file, digest in files.items() if _is_wheel_of(file, version)}
    return wheels or {digest for file, digest in files.items() if _is_source_of(file, version)}


def _is_wheel_of(file: str, version: str) -> bool:
    try:
        _, found, _, tags = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return False
    return found == Version(version) and any(
        (tag.interpreter in _INTERPRETERS or tag.abi == "abi3")
        and not tag.abi.endswith("t")
        and "musl" not in tag.platform
        and any(part in tag.platform for part in _PLATFORMS)
        for tag in tags
    )


def _is_source_of(file: str, version: str) -> bool:
    return file.endswith((".tar.gz", ".zip")) and parse_sdist_filename(file)[1] == Version(version)


if __name__ == "__main__":
    main()
