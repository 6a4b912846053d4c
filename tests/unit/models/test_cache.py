"""The cache of models: whole or not there, verified, one process at a time, and room asked for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from specray.environment import cache_directory
from specray.errors import ConfigError
from specray.gguf.light import RECORD
from specray.models import space
from specray.models.cache import KeptCheckpoint, ModelCache, file_sha256
from specray.models.space import check_space, format_size
from tests.unit.models.tiny_models import Recorder

KEY = "ab" * 32
OTHER = "cd" * 32


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache")


def keep(cache: ModelCache, name: str = "tiny", sha256: str = KEY) -> KeptCheckpoint:
    with cache.work_directory(sha256) as work:
        written = work / "checkpoint"
        written.mkdir()
        (written / "config.json").write_text("{}")
        (written / "model.safetensors").write_bytes(b"0123456789")
        return cache.keep_checkpoint(written, name, sha256)


def test_a_kept_checkpoint_is_found_by_the_checksum_of_its_source(cache: ModelCache) -> None:
    kept = keep(cache)
    assert kept.directory == cache.root / f"tiny-{KEY[:12]}"
    assert cache.checkpoint(KEY) == kept
    assert cache.checkpoint(OTHER) is None
    assert (kept.size, kept.problem()) == (12, None)
    assert list((cache.root / "partial").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"01234", "model.safetensors has 5 bytes instead of 10"),
        (b"0123456780", "model.safetensors has another checksum"),
        (None, "model.safetensors cannot be read: No such file or directory"),
    ],
)
def test_a_spoiled_file_is_a_problem(cache: ModelCache, content: bytes | None, problem: str) -> None:
    kept = keep(cache)
    path = kept.directory / "model.safetensors"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    found = cache.checkpoint(KEY)
    assert found is not None
    assert found.problem() == problem


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[]",
        json.dumps({"format": 3, "name": "tiny", "gguf_sha256": KEY, "files": {"config.json": [2, "x"]}}),
        json.dumps({"format": 4, "name": "tiny", "gguf_sha256": KEY, "files": {}}),
        json.dumps({"format": 4, "name": "tiny", "gguf_sha256": KEY, "files": {"../config.json": [2, "x"]}}),
    ],
)
def test_a_checkpoint_with_a_damaged_or_foreign_record_is_none(cache: ModelCache, record: str) -> None:
    kept = keep(cache)
    (kept.directory / RECORD).write_text(record)
    assert cache.checkpoint(KEY) is None
    assert keep(cache).problem() is None


def test_a_name_cannot_lead_out_of_the_cache(cache: ModelCache) -> None:
    kept = keep(cache, name="../..//evil name")
    assert kept.directory == cache.root / f"evil-name-{KEY[:12]}"
    assert kept.name == "../..//evil name"


def test_what_a_dead_process_left_behind_is_removed_by_the_next(cache: ModelCache) -> None:
    left_over = cache.root / "partial" / f"{KEY[:12]}-dead"
    others = cache.root / "partial" / f"{OTHER[:12]}-alive"
    for directory in (left_over, others):
        directory.mkdir(parents=True)
        (directory / "half").write_bytes(b"x")
    with cache.work_directory(KEY) as work:
        assert not left_over.exists()
        assert list(work.iterdir()) == []
    assert others.exists()
    assert not work.exists()


def test_the_lock_keeps_others_out_until_the_deadline(cache: ModelCache) -> None:
    first, second = Recorder(), Recorder()
    with cache.locked(KEY, first, "tiny"):
        with cache.locked(OTHER, first, "another"):
            pass
        with (
            pytest.raises(ConfigError, match=r"another process has been fetching tiny for 0\.2 s"),
            cache.locked(KEY, second, "tiny", deadline_s=0.2),
        ):
            pass
    assert first.notices == []
    assert second.notices == ["waiting for another process that fetches tiny"]
    with cache.locked(KEY, first, "tiny", deadline_s=0.2):
        pass


def test_removed_is_out_of_sight(cache: ModelCache) -> None:
    kept = keep(cache)
    cache.remove_checkpoint(kept)
    assert cache.checkpoints() == []
    assert not kept.directory.exists()
    assert list((cache.root / "partial").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ModelCache(tmp_path / "file")
    with (
        pytest.raises(ConfigError, match=f"the cache {tmp_path}/file cannot be used: Not a directory"),
        cache.locked(KEY, Recorder(), "tiny"),
    ):
        pass


def test_room_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    check_space(tmp_path, 1_000_000, "fetching tiny")
    with pytest.raises(ConfigError) as refused:
        check_space(tmp_path, 2_000_000, "fetching tiny")
    assert str(refused.value) == f"fetching tiny needs 2 MB in {tmp_path}, where 1 MB are free"


def test_sizes_for_people() -> None:
    assert [format_size(size) for size in (0, 98_362_432, 999_499_999, 1_240_000_000)] == [
        "0 MB",
        "98 MB",
        "999 MB",
        "1.2 GB",
    ]


def test_checksum_of_a_file_tells_how_far_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    seen: list[int] = []
    assert file_sha256(path, seen.append) == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert seen == [3]


def test_the_directory_of_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "specray"
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory() == tmp_path / ".cache" / "specray"


def test_no_leftovers_after_an_exception(cache: ModelCache) -> None:
    with pytest.raises(RuntimeError), cache.work_directory(KEY) as work:
        (work / "half").write_text("x")
        raise RuntimeError
    assert not work.exists()
