"""Tests of the notes by which `specray reload` finds a service of the same user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from specray.errors import ConfigError
from specray.serving.live.notes import AUTH_VARIABLES, find_note, noted


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in AUTH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / f"specray-{os.getuid()}"


def test_a_note_lives_as_long_as_its_service_and_only_its_user_reads_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token")
    with noted(8001, "127.0.0.1:6379"):
        note = find_note(8001)
        assert note == find_note(None)
        assert (note.pid, note.address, note.environment) == (
            os.getpid(),
            "127.0.0.1:6379",
            {"RAY_AUTH_TOKEN": "a-token"},
        )
        (path,) = directory.iterdir()
        assert (path.stat().st_mode & 0o777, directory.stat().st_mode & 0o777) == (0o600, 0o700)
        with pytest.raises(ConfigError, match=r"runs on HTTP port 8002 .*ports of those that run: 8001;"):
            find_note(8002)
    with pytest.raises(ConfigError, match=r"no service of yours runs on this machine; .*RAY_ADDRESS"):
        find_note(None)


def test_several_services_are_told_apart_by_their_port(directory: Path) -> None:
    with noted(8002, "a:1"):
        text = (directory / f"{os.getpid()}.json").read_text()
        (directory / "other.json").write_text(
            json.dumps({**json.loads(text), "port": 8001, "address": "b:1"})
        )
        (directory / "broken.json").write_text("{")
        with pytest.raises(ConfigError, match="name one with --port, of 8001, 8002"):
            find_note(None)
        assert [find_note(port).address for port in (8001, 8002)] == ["b:1", "a:1"]


def test_the_note_of_a_killed_service_is_forgotten(directory: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    with noted(8001, "a:1"):
        text = (directory / f"{os.getpid()}.json").read_text()
        (directory / "old.json").write_text(json.dumps({**json.loads(text), "pid": ended.pid, "port": 8002}))
        assert find_note(None).port == 8001
        assert not (directory / "old.json").exists()


def test_a_directory_that_others_may_enter_is_not_used(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="must be a directory of your own that nobody else may enter"):
        find_note(None)
    with pytest.raises(ConfigError), noted(8001, "a:1"):
        pass
