"""Hostile names, links and files of adapters: one sentence each, and nothing outside is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specray.adapter_folders import ADAPTER_FILES, MAX_FILE_BYTES, adapter_folder
from specray.errors import ConfigError

CONFIG, TENSORS = ADAPTER_FILES


def new_folder(directory: Path, name: str) -> Path:
    folder = directory / name
    folder.mkdir(parents=True)
    for file in ADAPTER_FILES:
        (folder / file).write_bytes(b"{}")
    return folder


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    new_folder(tmp_path, "outside")
    new_folder(tmp_path / "adapters", "sql")
    return tmp_path / "adapters"


def test_a_folder_is_found_and_links_within_the_directory_are_followed(directory: Path) -> None:
    (directory / "alias").symlink_to("sql")
    assert adapter_folder(directory, "sql") == adapter_folder(directory, "alias") == directory / "sql"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../outside",
        "/etc",
        "sql/",
        "sql/../sql",
        "a\\b",
        "sql\n",
        "sql\0",
        "é",
        "x" * 65,
        ".git",
    ],
)
def test_a_name_that_is_no_folder_name_is_refused(directory: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not allowed; allowed: the name of a folder"):
        adapter_folder(directory, name)


def test_links_that_lead_out_are_refused(directory: Path) -> None:
    (directory / "away").symlink_to("../outside")
    (directory / "itself").symlink_to(".")
    folder = new_folder(directory, "half")
    (folder / TENSORS).unlink()
    (folder / TENSORS).symlink_to("../../outside/" + TENSORS)
    for name in ("away", "itself"):
        with pytest.raises(ConfigError, match=f"{name!r} is a link that leads out of the directory"):
            adapter_folder(directory, name)
    with pytest.raises(ConfigError, match=f"'half': {TENSORS} is a link that leads out of the directory"):
        adapter_folder(directory, "half")


def test_files_that_are_missing_empty_or_too_large_are_refused_before_they_are_read(directory: Path) -> None:
    for name in ("none", "empty", "large", "pipe"):
        new_folder(directory, name)
    (directory / "none" / CONFIG).unlink()
    (directory / "empty" / TENSORS).write_bytes(b"")
    os.truncate(directory / "large" / CONFIG, MAX_FILE_BYTES[0] + 1)
    (directory / "pipe" / TENSORS).unlink()
    os.mkfifo(directory / "pipe" / TENSORS)
    for name, problem in (
        ("nobody", "is not in the directory of adapters"),
        ("none", f"has no file {CONFIG}"),
        ("empty", f"{TENSORS} has 0 bytes; allowed: 1"),
        ("large", f"{CONFIG} has {MAX_FILE_BYTES[0] + 1} bytes; allowed: 1..{MAX_FILE_BYTES[0]}"),
        ("pipe", f"has no file {TENSORS}"),
    ):
        with pytest.raises(ConfigError, match=problem):
            adapter_folder(directory, name)
