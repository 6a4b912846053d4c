"""Tests of the second attempt to start Ray when its processes do not come up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from specray.errors import ConfigError
from specray.serving.own_ray.ends import children
from specray.serving.own_ray.start import init_ray

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


class Starts:
    """Stands for ``ray.init``: each attempt starts a process, and raises what it is told."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, **options: Any) -> str:
        assert options == {"address": "local"}
        self.processes.append(subprocess.Popen(SLEEPER))
        error = self.errors.pop(0)
        if error is not None:
            raise error
        return "context"


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    made: list[Starts] = []

    def make(*errors: Exception | None) -> Starts:
        made.append(Starts(*errors))
        monkeypatch.setattr(ray, "init", made[-1])
        return made[-1]

    yield make
    for start in made:
        for process in start.processes:
            process.kill()
            process.wait()


pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are read off /proc")


def test_a_second_attempt_begins_when_the_processes_of_the_first_have_ended(
    starts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    other = subprocess.Popen(SLEEPER)
    try:
        start = starts(Exception("The current node timed out\nduring startup."), None)
        assert init_ray(address="local") == "context"
        first, second = start.processes
        assert first.pid not in children() and {second.pid, other.pid} <= children()
        assert "trying once more: The current node timed out during startup." in capsys.readouterr().err
    finally:
        other.kill()
        other.wait()


@pytest.mark.slow
def test_two_failures_are_told_in_words(starts: Any) -> None:
    start = starts(RuntimeError("no port"), TimeoutError("no node"))
    with pytest.raises(ConfigError, match=r"Ray did not start after two attempts: no node"):
        init_ray(address="local")
    assert not {process.pid for process in start.processes} & children()


def test_what_a_second_attempt_would_not_change_is_raised_at_once(starts: Any) -> None:
    start = starts(ValueError("num_cpus is -1"))
    with pytest.raises(ValueError, match="num_cpus"):
        init_ray(address="local")
    assert len(start.processes) == 1
