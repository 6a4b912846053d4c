"""Tests of the notes by which `specray reload` finds a service of the same user."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from specray.errors import ConfigError
from specray.serving.own_ray.notes import AUTH_VARIABLES, find_note, noted

HOST = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())


def note_file(directory: Path) -> Path:
    return directory / f"{HOST}-{os.getpid()}.json"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
        text = note_file(directory).read_text()
        (directory / f"{HOST}-1.json").write_text(
            json.dumps({**json.loads(text), "port": 8001, "address": "b:1"})
        )
        (directory / f"{HOST}-2.json").write_text("{")
        with pytest.raises(ConfigError, match="name one with --port, of 8001, 8002"):
            find_note(None)
        assert [find_note(port).address for port in (8001, 8002)] == ["b:1", "a:1"]


def test_the_note_of_a_killed_service_is_forgotten(directory: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    with noted(8001, "a:1"):
        text = note_file(directory).read_text()
        (directory / f"{HOST}-3.json").write_text(
            json.dumps({**json.loads(text), "pid": ended.pid, "port": 8002})
        )
        assert find_note(None).port == 8001
        assert not (directory / f"{HOST}-3.json").exists()


def squat(path: Path) -> None:
    path.mkdir(parents=True)
    path.chmod(0o777)


def test_a_directory_that_others_may_enter_is_not_used_and_stops_nobody(
    directory: Path, tmp_path: Path
) -> None:
    squat(directory)
    planted = {"pid": os.getpid(), "port": 8009, "address": "evil:1", "environment": {}}
    (directory / f"{HOST}-1.json").write_text(json.dumps(planted))
    with noted(8001, "a:1"):
        assert find_note(None).address == "a:1"
        assert [path.name for path in directory.iterdir()] == [f"{HOST}-1.json"]
        assert note_file(tmp_path / "cache/specray/services").is_file()
    assert list((tmp_path / "cache/specray/services").iterdir()) == []


def test_without_a_place_for_a_note_the_service_runs_and_says_so(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    squat(directory)
    (tmp_path / "cache").write_text("no directory")
    with noted(8001, "a:1"), pytest.raises(ConfigError, match="no service of yours runs"):
        find_note(None)
    (line,) = caplog.messages
    assert "RAY_ADDRESS=a:1" in line
    assert f"{directory} must be a directory of your own that nobody else may enter; " in line


def test_a_full_disk_leaves_no_half_note(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(json, "dump", full)
    with noted(8001, "a:1"):
        assert list(directory.iterdir()) == []
        assert list((tmp_path / "cache/specray/services").iterdir()) == []


def test_a_note_of_another_machine_with_this_home_is_left_alone(tmp_path: Path) -> None:
    with noted(8001, "a:1"):
        other = tmp_path / "cache/specray/services/elsewhere-1.json"
        other.parent.mkdir(mode=0o700, parents=True)
        other.write_text("{}")
        assert find_note(None).port == 8001
        assert other.exists()
