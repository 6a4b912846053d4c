"""A disk without room for Ray's files ends a start with one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from specray.errors import ConfigError
from specray.serving.own_ray.nodes import check_room


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("free", "is_enough"), [(127_999_999, False), (128_000_000, True)])
def test_a_nearly_full_disk_is_refused_by_its_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch, free: int, is_enough: bool
) -> None:
    asked = list[Path]()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=free))
    if is_enough:
        check_room()
    else:
        with pytest.raises(ConfigError, match=rf"{directory}, .* has 128 MB free; allowed: 128 MB or more"):
            check_room()
    assert asked == [directory]


def test_rays_own_setting_wins_and_a_missing_directory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/no/such/place")
    with pytest.raises(ConfigError, match="/no/such/place, for Ray's files, cannot be used: No such file"):
        check_room()
