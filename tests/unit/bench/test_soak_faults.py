"""Tests of a soak's faults on fakes: what is tried again and restored, and a client that sends no end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from specray.bench.soak import neighbours
from specray.bench.soak.cases import Way, make_cases
from specray.bench.soak.clients import CaseSender
from specray.bench.soak.faults import inject
from specray.bench.soak.ledger import End
from specray.bench.soak.neighbours import MAX_HEAD_BYTES, lose_ray, send_endless_head
from specray.bench.soak.plan import SoakPlan
from specray.bench.soak.run import Fault, Soak
from specray.bench.soak.schedule import FaultKind, PlannedFault
from specray.bench.soak.watch import Whole
from specray.bench.testbed import beds
from specray.bench.testbed.beds import Bed, DraftCable, Nodes
from specray.bench.testbed.kinds import BedKind
from specray.bench.testbed.service import Control
from specray.config import parse_config
from specray.errors import EngineLostError
from specray.fakes import VirtualClock

DEADLINE_S = 30.0


SERVICE = """
import pathlib, subprocess, sys
starts = pathlib.Path({starts!r})
starts.write_text(starts.read_text() + "x")
if len(starts.read_text()) <= {num_taken}:
    sys.exit("http.port: cannot listen on 127.0.0.1:1: Address already in use")
print("Ctrl-C stops every process.", flush=True)
subprocess.run(["sleep", "60"])
sys.exit(1)
"""
"""A service whose port is taken at its first starts, and which ends with 1 when its part ``sleep`` does."""


class FakeNodes:
    """Nodes of which the next ``num_failing`` starts fail, each after ``start_s`` seconds."""

    def __init__(
        self, clock: VirtualClock, *, num: int = 1, num_failing: int = 0, start_s: float = 30.0
    ) -> None:
        self.clock, self.num, self.num_failing, self.start_s = clock, num, num_failing, start_s
        self.events: list[str] = []

    async def remove(self) -> None:
        self.num -= 1
        self.events.append("removed")

    async def add(self) -> None:
        await self.clock.sleep(self.start_s)
        if self.num_failing:
            self.num_failing -= 1
            self.events.append("failed")
            raise EngineLostError("the node timed out within Ray")
        self.num += 1
        self.events.append("added")

    async def count(self) -> int:
        return self.num

    def nodes(self) -> Nodes:
        return Nodes(self.remove, self.add, self.count)


class FakeControl:
    async def parts(self) -> tuple[Any, ...]:
        return ()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock()
    monkeypatch.setattr(beds.time, "monotonic", clock.monotonic)
    return clock


def bed(nodes: FakeNodes, cable: list[object] | None = None) -> Bed:
    async def set_up(is_up: bool) -> None:
        assert cable is not None
        cable.append(is_up)

    async def impair(delay_ms: float, loss: float) -> None:
        assert cable is not None
        cable.append((delay_ms, loss))

    control: Any = FakeControl()
    link = None if cable is None else DraftCable(set_up, impair)
    return Bed(BedKind.NAMESPACES, parse_config({}), control, Path(), nodes.nodes(), link)


def remove_node(nodes: FakeNodes) -> Awaitable[Any]:
    rng: Any = None
    return inject(bed(nodes), PlannedFault(FaultKind.NODE_REMOVE, 0.0, 3.0), rng)


def test_a_join_that_fails_is_tried_again_within_its_time(clock: VirtualClock) -> None:
    nodes = FakeNodes(clock, num_failing=3)
    assert clock.run(remove_node(nodes)).what == "the draft's node"  # type: ignore[arg-type]
    assert nodes.events == ["removed", "failed", "failed", "failed", "added"]


def test_a_join_that_never_succeeds_ends_with_its_time_and_the_next_fault_finds_a_node(
    clock: VirtualClock,
) -> None:
    cable: list[object] = []
    nodes = FakeNodes(clock, num_failing=4)
    with pytest.raises(EngineLostError, match="timed out within Ray"):
        clock.run(remove_node(nodes))  # type: ignore[arg-type]
    assert nodes.events == ["removed", *["failed"] * 4]
    clock.run(bed(nodes, cable).restore())
    assert nodes.events[5:] == ["added"]
    assert cable == [True, (0.0, 0.0)]


def test_a_node_too_many_is_removed_when_a_drain_has_failed(clock: VirtualClock) -> None:
    nodes = FakeNodes(clock, num=2)
    clock.run(bed(nodes).restore())
    assert (nodes.num, nodes.events) == (1, ["removed"])


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_what_was_not_done_or_is_not_whole_is_restored_before_the_next_fault(
    monkeypatch: pytest.MonkeyPatch, is_done: bool, is_whole: bool
) -> None:
    said: list[str] = []
    events: list[str] = []

    async def do(*_: object) -> Any:
        if not is_done:
            raise EngineLostError("nobody to do it to")
        return type("Done", (), {"what": "draft 7", "killed": frozenset({7})})

    async def restore(_: object) -> None:
        events.append("restored")

    async def wait_whole(killed: frozenset[int]) -> Whole | None:
        events.append(f"waited without {sorted(killed)}")
        return Whole(2.0, 3.0) if is_whole or events[:-1] else None

    monkeypatch.setattr("specray.bench.soak.run.inject", do)
    monkeypatch.setattr(Bed, "restore", restore)
    nothing: Any = None
    plan = SoakPlan(faults="none")
    soak = Soak(plan, bed(FakeNodes(VirtualClock())), nothing, nothing, said.append)
    monkeypatch.setattr(soak, "wait_whole", wait_whole)
    await soak.inject_fault(PlannedFault(FaultKind.DRAFT_KILL, 0.0), nothing)
    (fault,) = soak.result.faults
    assert (fault.is_over, fault.is_done, fault.whole_after_s is not None) == (True, is_done, is_whole)
    killed = [7] if is_done else []
    later = [] if is_done and is_whole else ["restored", "waited without []"]
    assert events == [f"waited without {killed}", *later]


async def test_requests_are_sent_again_while_the_ingress_is_away_and_else_once() -> None:
    nothing: Any = None
    (case, *_) = make_cases(1, seed=0)
    is_away = iter([True, True, False])

    class Sender(CaseSender):
        async def _send(self, *_: object) -> None:
            raise EngineLostError("connection refused")

    sender = Sender(nothing, nothing, model="m", timeout_s=1.0)
    attempts = await sender.request(case, Way.WHOLE, [], is_away=lambda: next(is_away))
    assert [attempt.end for attempt in attempts] == [End.RETRIABLE] * 4
    assert len(await sender.request(case, Way.WHOLE, [])) == 2


async def test_ctrl_c_during_the_load_gives_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    plan = SoakPlan(faults="none", num_clients=0)
    soak = Soak(plan, bed(FakeNodes(VirtualClock())), nothing, nothing, lambda text: None)
    is_hurting = asyncio.Event()

    async def hurt() -> None:
        soak.result.faults.append(Fault(FaultKind.DRAFT_KILL, 1.0, 0.0))
        is_hurting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(soak, "inject_faults", hurt)
    task = asyncio.create_task(soak.load([], []))
    await asyncio.wait_for(is_hurting.wait(), DEADLINE_S)
    task.cancel()
    await asyncio.wait_for(task, DEADLINE_S)
    assert (soak.result.is_interrupted, len(soak.result.faults), task.cancelling()) == (True, 1, 0)


async def heads(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> str:
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        return await send_endless_head(*server.sockets[0].getsockname())


async def test_a_head_without_end_is_refused_or_it_is_a_failure() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(100_000)
        writer.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\n\r\n")
        writer.close()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 20):
            pass
        writer.close()

    said = await heads(refuse)
    assert said.endswith(" bytes of a head") and int(said.split()[0]) < MAX_HEAD_BYTES
    with pytest.raises(
        EngineLostError, match=f"{MAX_HEAD_BYTES} bytes of a head that does not end were taken"
    ):
        await heads(take)


async def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "first, second = (json.loads(sys.stdin.readline()) for _ in range(2))\n"
        "for asked in (first, second):\n"
        "    print(json.dumps({'id': asked['id'], 'value': asked['op']}), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("python3", "-c", code, stdin=pipe, stdout=pipe)
    control = Control(process, tmp_path / "log")
    try:
        with pytest.raises(EngineLostError, match=r"did not answer within 0\.05 s"):
            await control.call("slow", timeout_s=0.05)
        assert await control.call("quick", timeout_s=DEADLINE_S) == "quick"
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


@pytest.mark.parametrize("num_taken", [2, 3])
async def test_neighbour_whose_port_was_taken_meanwhile_is_started_on_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_taken: int
) -> None:
    starts = tmp_path / "starts"
    starts.touch()
    service = SERVICE.format(starts=str(starts), num_taken=num_taken)
    monkeypatch.setattr(neighbours, "SERVE_COMMAND", (sys.executable, "-c", service))
    if num_taken < 3:
        assert "another service without its sleep ended after" in await lose_ray("sleep", tmp_path)
    else:
        with pytest.raises(EngineLostError, match=r"did not start: .*Address already in use"):
            await lose_ray("sleep", tmp_path)
    assert starts.read_text() == "xxx"
