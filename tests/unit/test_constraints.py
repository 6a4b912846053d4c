"""What make and CI install: pins within pyproject.toml's bounds, and a hash for each archive."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LINES = [
    line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")
]
PINS = {name: version for name, _, version in (line.split()[0].partition("==") for line in LINES)}


def test_every_pin_has_hashes_and_nothing_else() -> None:
    for line in LINES:
        assert re.fullmatch(r"[a-z0-9-]+==[^ ]+( --hash=sha256:[0-9a-f]{64})+", line), line


def test_every_requirement_is_pinned_within_its_bounds() -> None:
    values = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = values["project"]["optional-dependencies"]
    wanted = values["project"]["dependencies"] + optional["dev"] + optional["otlp"]
    for requirement in map(Requirement, wanted + values["build-system"]["requires"]):
        pin = PINS[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement}, pinned {pin}"


def test_libraries_whose_inner_parts_are_used_are_bound_to_a_minor_version() -> None:
    values = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = {entry.name: entry for entry in map(Requirement, values["project"]["dependencies"])}
    for name in ("h11", "uvicorn"):
        major, minor, _ = PINS[name].split(".")
        assert not required[name].specifier.contains(f"{major}.{int(minor) + 1}.0"), name


def test_the_makefile_and_the_image_install_nothing_without_hashes() -> None:
    for name in ("Makefile", "cluster/Dockerfile"):
        text = re.sub(r"\\\n\s*", " ", (ROOT / name).read_text())
        commands = re.findall(r"pip install .*?(?=&&|\n|$)", text)
        unchecked = [line for line in commands if "--require-hashes" not in line and "--no-deps" not in line]
        # The environments of clients, documents and fuzzing have files of their own, and serve nobody.
        assert unchecked in ([], ["pip install --quiet --requirement $<"]), name


def test_the_image_is_built_from_a_digest() -> None:
    text = (ROOT / "cluster/Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases == ["${BASE}", "${BASE}"]
    assert re.search(r"^ARG BASE=python:\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
