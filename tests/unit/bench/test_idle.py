"""What an idle service's processes are seen to use, on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specray.bench.idle import IdleRow, measure_idle, used_by, whole
from specray.bench.testbed.tree import descendants

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="processes are read off /proc")
SLEEPING = """
import sys, time
print("begun", flush=True)
sys.stdin.readline()
for _ in range(20):
    time.sleep(0.001)
print("slept", flush=True)
sys.stdin.readline()
"""
SPINNING = "import subprocess\nsubprocess.Popen(['sleep', '60'])\nwhile True: pass"


@contextmanager
def running(*command: str, num_below: int) -> Iterator[int]:
    """The id of a process with that many below it; all are killed at the end."""
    process = subprocess.Popen(command)
    try:
        while len(descendants(process.pid)) < num_below:
            time.sleep(0.01)
        yield process.pid
    finally:
        for pid in descendants(process.pid):
            os.kill(pid, 9)
        process.kill()
        process.wait()


def test_one_that_computes_comes_before_one_that_sleeps_below_it() -> None:
    with running(sys.executable, "-c", SPINNING, num_below=1) as pid:

        def until_it_has_computed(duration_s: float) -> None:
            before = used_by(pid)
            assert before is not None
            while (now := used_by(pid)) is not None and now.seconds < before.seconds + 0.05:
                time.sleep(0.01)

        rows = measure_idle(pid, duration_s=60, sleep=until_it_has_computed)
    assert [row.process for row in rows][1:] == ["sleep"]
    assert rows[0].percent > 0 == rows[1].percent
    assert all(row.mib for row in rows)


def test_one_that_ends_meanwhile_is_not_counted() -> None:
    with running("sh", "-c", "sleep 60 & sleep 61 & wait", num_below=2) as pid:
        first, _ = descendants(pid)
        rows = measure_idle(pid, duration_s=60, sleep=lambda _: _kill(first))
    assert sorted(row.process for row in rows) == ["sh", "sleep"]


def _kill(pid: int) -> None:
    os.kill(pid, 9)
    while used_by(pid) is not None:
        time.sleep(0.01)


def test_each_sleep_is_a_wake() -> None:
    """In a process of its own: threads of other tests that end meanwhile take their sleeps with them."""
    command = [sys.executable, "-c", SLEEPING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        before = used_by(process.pid)
        process.stdin.write("sleep\n")
        process.stdin.flush()
        assert process.stdout.readline() == "slept\n"
        after = used_by(process.pid)
    assert before is not None and after is not None
    assert after.num_wakes - before.num_wakes >= 20


def test_all_processes_are_the_sum() -> None:
    rows = (IdleRow("a", 2.0, 10.0, 5.0), IdleRow("b", 0.5, 1.0, None))
    assert whole(rows) == IdleRow("all processes", 2.5, 11.0, None)
