"""Tests of a worker of several ranks without Ray: it answers as one rank does, and it ends as a whole."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

import specray.serving.local.ranks
from specray.bench.core.provenance import hardware_name
from specray.config import EngineConfig, parse_config
from specray.demo.paths import demo_target_path
from specray.engine.device import num_usable_cores, visible_gpus
from specray.errors import EngineLostError
from specray.requests import GenerateRequest
from specray.serving.local import pair as pair_module
from specray.serving.local.pair import local_pair
from specray.serving.local.ranks import follow, local_ranks, sharing_cores
from specray.tokenization import make_stop_matcher
from specray.types import SamplingParams
from tests.processes import is_running, wait_gone
from tests.unit.engine.processes import ForkedCommand, forked_worker
from tests.unit.serving.http.service import TOKENIZER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes through /proc"),
]

DEADLINE_S = 240.0
SMALL = ("--dtype=float32", "--max-model-len=128", "--num-threads=1")
UNMEASURED = ("--set=target.profile_s=0", "--set=draft.profile_s=0")
PROMPT = (5, 6, 7, 8, 9, 10, 11)


@contextmanager
def worker(role: str, directory: Path, *options: str, starts_ranks: bool = False) -> Iterator[ForkedCommand]:
    arguments = ["worker", role, f"--listen=unix:{directory / 's'}", *SMALL, *UNMEASURED, *options]
    process = ForkedCommand(arguments, directory / "log", starts_ranks=starts_ranks)
    try:
        yield process
    finally:
        process.close()


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found: list[int] = []
    for task in tasks:
        # A thread may end meanwhile; those that start ranks do not.
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return found


def ready_with_its_rank(process: ForkedCommand) -> int:
    """Returns the other rank's process id, once the worker listens."""
    assert "worker listens on" in process.first_words(DEADLINE_S)
    (rank,) = children(process.pid)
    return rank


async def outputs(tensor_parallel_size: int, *, has_draft: bool) -> list[tuple[int, ...]]:
    """Returns a greedy and a sampled output of engines that have this many ranks each."""
    model = {"model": str(demo_target_path()), "dtype": "float32", "max_model_len": 128, "profile_s": 0}
    engine = {**model, "tensor_parallel_size": tensor_parallel_size, "num_threads": 1}
    config = parse_config(
        {
            "target": engine,
            "draft": {**engine, "enabled": has_draft},
            "speculation": {"num_speculative_tokens": 3, "overlap": "serial"},
        }
    )
    found = []
    async with local_pair(config) as pair:
        sizes = [info.tensor_parallel_size for info in await pair.infos() if info is not None]
        assert sizes == [tensor_parallel_size] * (2 if has_draft else 1)
        router = pair.router(config, make_stop_matcher(TOKENIZER))
        await router.start()
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(temperature=temperature, seed=7, num_prompt_tokens=len(PROMPT))
            request = GenerateRequest(f"t{temperature}", PROMPT, sampling, max_tokens=24)
            found.append((await router.complete(request)).token_ids)
        await router.stop()
    return found


@pytest.mark.timeout(DEADLINE_S)
async def test_a_pair_of_two_ranks_each_gives_the_tokens_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_module, "start_worker", forked_worker)
    alone, together = await outputs(1, has_draft=False), await outputs(2, has_draft=True)
    assert together == alone
    assert [len(tokens) for tokens in alone] == [24, 24]


@pytest.mark.timeout(DEADLINE_S)
def test_a_signal_ends_the_worker_with_its_rank(tmp_path: Path) -> None:
    """The rank is a program, as users start it."""
    with worker("target", tmp_path, "--set=target.tensor_parallel_size=2", starts_ranks=True) as process:
        rank = ready_with_its_rank(process)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert not is_running(rank)


@pytest.mark.timeout(DEADLINE_S)
def test_a_rank_that_dies_ends_the_worker_which_says_so(tmp_path: Path) -> None:
    with worker("target", tmp_path, "--set=target.tensor_parallel_size=2") as process:
        os.kill(ready_with_its_rank(process), signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 1
        assert "rank 1 of the target has ended, with exit status -9" in process.log.read_text("utf-8")


@pytest.mark.timeout(DEADLINE_S)
def test_a_worker_that_is_killed_leaves_no_rank(tmp_path: Path) -> None:
    with worker("target", tmp_path, "--set=target.tensor_parallel_size=2") as process:
        rank = ready_with_its_rank(process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
        assert wait_gone(rank)


@pytest.mark.timeout(DEADLINE_S)
def test_a_model_that_cannot_be_shared_is_refused_at_once(tmp_path: Path) -> None:
    # The embedded draft has five heads.
    with worker("draft", tmp_path, "--set=draft.tensor_parallel_size=2") as process:
        assert process.wait(DEADLINE_S) == 2
        assert "tensor_parallel_size" in process.log.read_text("utf-8")


def with_ranks_that(code: str, *, wait_s: float) -> list[int]:
    """Returns the signals that came while ranks of a group ran this code, for at most so long."""
    config = parse_config({"target": {"tensor_parallel_size": 3, "device": "cpu"}})
    came = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.set())
    try:
        with local_ranks(config, "target", worker_command=(sys.executable, "-c", code)):
            came.wait(wait_s)
    finally:
        signal.signal(signal.SIGTERM, before)
    return [signal.SIGTERM] if came.is_set() else []


def test_ranks_that_were_let_go_are_no_loss() -> None:
    assert with_ranks_that("pass", wait_s=1.5) == []


def test_one_rank_that_fails_ends_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specray.serving.local.ranks, "END_TIMEOUT_S", 0.2)
    with pytest.raises(EngineLostError, match=r"^rank 2 of the target has ended, with exit status 3$"):
        with_ranks_that(
            "import sys, time; sys.exit(3) if '--rank=2' in sys.argv else time.sleep(60)", wait_s=30.0
        )


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_rank_that_loads_nothing_or_loses_its_leader_leaves_the_group(
    is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group's threads would outlive the interpreter."""
    lost = EngineLostError("the leader is gone")
    group, runner = Mock(), Mock(**{"follow.side_effect": lost})
    build = Mock(return_value=runner) if is_loaded else Mock(side_effect=lost)
    monkeypatch.setattr(specray.serving.local.ranks, "join_group", Mock(return_value=group))
    monkeypatch.setattr(specray.serving.local.ranks, "build_follower", build)
    monkeypatch.setattr(specray.serving.local.ranks, "apply_interface_environment", Mock())
    with pytest.raises(EngineLostError, match="the leader is gone"):
        follow(parse_config({}), "target", 1, "127.0.0.1:1")
    assert (runner.follow.call_count, group.close.call_count) == (is_loaded, 1)


def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.engine.device.num_usable_cores", lambda: 8)
    own: dict[str, dict[str, object]] = {"target": {"tensor_parallel_size": 3, "device": "cpu"}}
    assert sharing_cores(parse_config(own), "target").target.num_threads == 2
    own["target"]["cores"] = [0, 1, 2, 3, 4, 5, 6]
    assert sharing_cores(parse_config(own), "target").target.num_threads == 2
    own["target"]["cores"] = [0, 1]
    assert sharing_cores(parse_config(own), "target").target.num_threads == 1
    own["target"]["num_threads"] = 5
    assert sharing_cores(parse_config(own), "target").target.num_threads == 5


def test_a_rank_on_cpu_is_named_after_its_share_of_the_cores() -> None:
    cores = num_usable_cores()
    one = hardware_name(EngineConfig.model_validate({"device": "cpu"}))
    many = hardware_name(EngineConfig.model_validate({"device": "cpu", "tensor_parallel_size": cores}))
    assert one.startswith(many.removesuffix(", 1 core"))
    assert one.endswith(f", {cores} core{'s' if cores > 1 else ''}") and many.endswith(", 1 core")


@pytest.mark.parametrize(("listed", "gpus"), [("", ()), ("2, GPU-8f", ("2", "GPU-8f")), ("0,1", ("0", "1"))])
def test_gpus_are_those_that_cuda_is_to_see(
    monkeypatch: pytest.MonkeyPatch, listed: str, gpus: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus() == gpus
