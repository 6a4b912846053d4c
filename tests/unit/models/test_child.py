"""Children of this process: watched, ended at their deadline, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specray.models.child import run_child
from tests.processes import is_running

ROOT = Path(__file__).resolve().parents[3]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_output_errors_and_exit_code(tmp_path: Path) -> None:
    ticks: list[None] = []
    ended = run_child(
        python("import os, sys; print(os.environ['WORD']); sys.stderr.write('no'); sys.exit(3)"),
        directory=tmp_path,
        environment={"WORD": "yes"},
        deadline_s=30,
        tick=lambda: ticks.append(None),
    )
    assert (ended.returncode, ended.output, ended.errors) == (3, "yes\n", "no")
    assert ticks


@pytest.mark.slow
def test_a_child_is_ended_at_its_deadline(tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    started_s = time.monotonic()
    ended = run_child(python(code), directory=tmp_path, environment={}, deadline_s=1.5, tick=lambda: None)
    assert ended.returncode is None
    assert time.monotonic() - started_s < 30
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_an_exception_while_it_runs_ends_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt() -> None:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(python(code), directory=tmp_path, environment={}, deadline_s=30, tick=interrupt)
    assert not is_running(int(pid.read_text()))


def test_sigterm_ends_parent_and_child(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = (
        "import sys\nfrom pathlib import Path\nfrom specray.models.child import run_child\n"
        f"run_child([sys.executable, '-c', {child!r}], directory=Path({str(tmp_path)!r}), environment={{}}, "
        "deadline_s=60, tick=lambda: None)"
    )
    process = subprocess.Popen(python(parent), env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        wait_for(lambda: pid.exists() and bool(pid.read_text()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    finally:
        process.kill()
    assert not is_running(int(pid.read_text()))


def wait_for(condition: object, deadline_s: float = 30) -> None:
    end_s = time.monotonic() + deadline_s
    assert callable(condition)
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)
