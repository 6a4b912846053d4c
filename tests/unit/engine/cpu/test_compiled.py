"""Kernels cached on disk: those of different processes do not clash in a third."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("numba")
from numba import types

from specray.engine.cpu import compiled
from specray.engine.cpu.compiled import CompiledFunction

pytestmark = pytest.mark.slow

# The difference is inside a function of one name that is too long to be inlined, as in kernels for different
# head sizes. Processes are forked, so that numba is imported once; it has compiled nothing before.
SCRIPT = """
import ctypes, os, sys
from numba import njit, types
from specray.engine.cpu import compiled
from specray.engine.cpu.compiled import CompiledFunction

def adding(constant):
    body = "    number = (number ^ (number >> 3)) * constant\\n" * 60
    exec(f"def inner(number):\\n{body}    return number", {"constant": constant}, functions := {})
    inner = njit(functions["inner"])
    def add(number):
        return number + inner(number)
    return add

def call(constant):
    signature, prototype = types.int64(types.int64), ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    return CompiledFunction(f"add-{constant}", signature, prototype, lambda: adding(constant)).call(100)

for constants in sys.argv[1:]:
    process = os.fork()
    if process == 0:
        print(*[call(int(constant)) for constant in constants.split(",")], flush=True)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


def test_functions_of_one_name_from_two_processes_stay_two(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, "1", "2", "1,2,3", "2,1"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    [one], [two], together, reverse = [
        [int(number) for number in line.split()] for line in done.stdout.splitlines()
    ]
    assert one != two
    assert together[:2] == [one, two]
    assert reverse == [two, one]


def is_compiled(name: str = "add") -> bool:
    """Whether a kernel is compiled and not loaded; it computes the same."""
    made = []

    def make() -> Callable[[int], int]:
        made.append(name)
        return lambda number: number + 7

    signature, prototype = types.int64(types.int64), ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    assert CompiledFunction(name, signature, prototype, make).call(1) == 8
    return bool(made)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a kernel that has been compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert is_compiled()
    [path] = tmp_path.rglob("*.bin")
    return path


def test_a_kernel_of_ours_is_loaded(kept: Path) -> None:
    assert not is_compiled()
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_file_that_cannot_take_its_place_leaves_nothing_behind(kept: Path) -> None:
    kept.unlink()
    kept.mkdir()
    assert is_compiled()
    assert [one.name for one in kept.parent.iterdir()] == ["add.bin"]


def test_a_file_that_is_kept_is_whole_when_it_takes_its_place(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    replace = Path.replace

    def watched(part: Path, path: Path) -> Path:
        sizes.append(part.stat().st_size)
        return replace(part, path)

    monkeypatch.setattr(Path, "replace", watched)
    # So little that a file holds it back until it is closed.
    monkeypatch.setattr(compiled.pickle, "dumps", lambda stored: b"code")
    assert is_compiled("more")
    assert sizes == [36]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_may_write_gives_no_code_and_takes_none(kept: Path, mode: int) -> None:
    kept.parent.chmod(mode)
    assert is_compiled() and is_compiled("more")
    assert [path.name for path in kept.parent.iterdir()] == ["add.bin"]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_gives_no_code(kept: Path, mode: int) -> None:
    kept.chmod(mode)
    assert is_compiled()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_gives_no_code(kept: Path) -> None:
    os.chown(kept, 65534, 65534)
    assert is_compiled()
