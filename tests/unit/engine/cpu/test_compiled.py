"""Kernels cached on disk: those of different processes do not clash in a third."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numba")
from specray.engine.cpu import compiled

pytestmark = pytest.mark.slow

# The difference is inside a function of one name that is too long to be inlined, as in kernels for different
# head sizes. Processes are forked, so that numba is imported once; it has compiled nothing before.
SCRIPT = """
import ctypes, os, sys
from numba import njit, types
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


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that loads as a kernel named ``code``, unless others may write it."""
    monkeypatch.setattr(compiled.pickle, "loads", lambda content: ("symbol", content))
    codegen = SimpleNamespace(
        codegen=lambda: SimpleNamespace(
            unserialize_library=lambda state: SimpleNamespace(get_pointer_to_function=lambda symbol: 7)
        )
    )
    monkeypatch.setattr(compiled, "cpu_target", SimpleNamespace(target_context=codegen))
    monkeypatch.setattr(compiled.rtsys, "initialize", lambda context: None)
    path = tmp_path / "kernels" / "code.bin"
    compiled._write(path, b"code")
    return path


def test_a_kernel_of_ours_is_loaded(kept: Path) -> None:
    found = compiled._load(kept)
    assert found is not None and found[1] == 7
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_may_write_gives_no_code_and_takes_none(kept: Path, mode: int) -> None:
    kept.parent.chmod(mode)
    assert compiled._load(kept) is None
    compiled._write(kept.parent / "more.bin", b"code")
    assert [path.name for path in kept.parent.iterdir()] == ["code.bin"]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_gives_no_code(kept: Path, mode: int) -> None:
    kept.chmod(mode)
    assert compiled._load(kept) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_gives_no_code(kept: Path) -> None:
    os.chown(kept, 65534, 65534)
    assert compiled._load(kept) is None
