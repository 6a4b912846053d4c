"""Kernels cached on disk: those of different processes do not clash in a third."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
from specray.engine.cpu import compiled

pytestmark = pytest.mark.slow

# The difference is inside a function of one name that is too long to be inlined, as in kernels for different
# head sizes.
SCRIPT = """
import ctypes, sys
from numba import njit, types
from specray.engine.cpu.compiled import CompiledFunction

def adding(constant):
    body = "    number = (number ^ (number >> 3)) * constant\\n" * 300
    exec(f"def inner(number):\\n{body}    return number", {"constant": constant}, functions := {})
    inner = njit(functions["inner"])
    def add(number):
        return number + inner(number)
    return add

for constant in map(int, sys.argv[1:]):
    signature, prototype = types.int64(types.int64), ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    print(CompiledFunction(f"add-{constant}", signature, prototype, lambda: adding(constant)).call(100))
"""


def test_functions_of_one_name_from_two_processes_stay_two(tmp_path: Path) -> None:
    def run(*constants: int) -> list[int]:
        command = [sys.executable, "-c", SCRIPT, *map(str, constants)]
        environment = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        return [int(line) for line in done.stdout.split()]

    (one,), (two,) = run(1), run(2)
    assert one != two
    assert run(1, 2, 3)[:2] == [one, two]
    assert run(2, 1) == [two, one]


def test_a_file_that_cannot_take_its_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "kept" / "add.bin").mkdir(parents=True)
    compiled._write(tmp_path / "kept" / "add.bin", b"code")
    assert [one.name for one in (tmp_path / "kept").iterdir()] == ["add.bin"]


def test_a_file_that_is_kept_is_whole_when_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    replace = Path.replace

    def watched(part: Path, path: Path) -> Path:
        sizes.append(part.stat().st_size)
        return replace(part, path)

    monkeypatch.setattr(Path, "replace", watched)
    compiled._write(tmp_path / "add.bin", b"code")
    assert sizes == [36]
