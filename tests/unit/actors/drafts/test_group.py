"""Drafts with several ranks: the group starts, fails, hangs and changes its model as one."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from specray.actors import workers
from specray.actors.drafts import deployment as draft_module
from specray.actors.drafts import group as draft_group
from specray.actors.drafts.deployment import DraftReplica
from specray.actors.drafts.group import DraftGroup
from specray.actors.targets.place import GpuPlace, RankProcess
from specray.config import Config, EngineConfig, parse_config
from specray.engine.group.parallel import GroupArgs
from specray.errors import ConfigError, EngineLostError

PLACE = GpuPlace(0, ("2", "0"), 0)
RANKS = parse_config({"draft": {"tensor_parallel_size": 3}, "router": {"start_timeout_s": 5}})


class Server:
    """Stands in for rpc.workers.worker.EngineServerThread."""

    def __init__(self, said: list[str]) -> None:
        self._said = said
        self.is_alive = True
        self.call_s = 0.0
        self.num_routers, self.busy_share, self.info = 2, 0.5, None

    def stop(self, *, grace_s: float, drain_s: float) -> None:
        self._said.append(f"server ends, drained for {drain_s:g} s")


class Followers:
    """Stands in for group.PlacedRanks."""

    def __init__(self, said: list[str], *, failure: Exception | None = None) -> None:
        self._said = said
        self._failure = failure
        self.own_place: GpuPlace | None = None
        self.hangs = False
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def place(self, num_ranks: int, *, first_rank: int) -> None:
        self._said.append(f"{num_ranks} from rank {first_rank}")
        self.own_place = PLACE

    async def start(self, meeting: str) -> list[str | None]:
        assert meeting.startswith("127.0.0.1:")
        if self._failure is not None:
            raise self._failure
        return [None, None]

    async def processes(self) -> list[RankProcess]:
        if self.hangs:
            await asyncio.Event().wait()
        return []

    async def ended(self) -> str:
        return await asyncio.shield(self.lost)

    def stop(self) -> None:
        self._said.append("ranks end")

    async def end(self) -> None:
        self._said.append("ranks end in order")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    def start(config: Config, *, place: GpuPlace, **_: Any) -> tuple[Server, str]:
        assert place is PLACE, "a rank that is no actor has its place too"
        return Server(said), "unix:/draft"

    monkeypatch.setattr(workers, "start_draft", start)
    monkeypatch.setattr(draft_group, "SILENCE_S", 0.05)
    return said


async def started(said: list[str]) -> tuple[DraftGroup, Followers]:
    followers: Any = Followers(said)
    group = DraftGroup(RANKS, followers)
    await group.start()
    assert said == ["2 from rank 1"]
    said.clear()
    return group, followers


async def test_ranks_end_after_the_server_that_leads_them(said: list[str]) -> None:
    group, _ = await started(said)
    await group.check()
    assert (group.can_be_leased, group.address) == (True, "unix:/draft")
    await group.stop(drain_s=5)
    assert said == ["server ends, drained for 5 s", "ranks end in order"]


async def test_a_lost_rank_ends_the_others_and_is_what_the_health_check_says(said: list[str]) -> None:
    group, followers = await started(said)
    followers.lost.set_result("draft rank 2 ended: it died")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (said, group.can_be_leased) == (["ranks end"], False)
    with pytest.raises(EngineLostError, match="draft rank 2 ended: it died"):
        await group.check()
    said.clear()
    await group.stop(drain_s=5)
    # Waiting for it would never end now.
    assert said == ["ranks end", "server ends, drained for 0 s", "ranks end in order"]


async def test_a_rank_that_hangs_fails_health_checks_until_it_answers(said: list[str]) -> None:
    group, followers = await started(said)
    followers.hangs = True
    with pytest.raises(EngineLostError, match=r"a rank of the draft has been silent for 0\.05 s"):
        await group.check()
    assert not group.can_be_leased
    followers.hangs = False
    await group.check()
    assert group.can_be_leased
    followers.hangs = True
    with pytest.raises(EngineLostError):
        await group.check()
    await group.stop(drain_s=5)
    assert said == ["ranks end", "server ends, drained for 0 s", "ranks end in order"]


async def test_an_engine_that_routers_have_given_up_is_not_leased(said: list[str]) -> None:
    group, _ = await started(said)
    server: Any = group.server
    server.call_s = RANKS.router.round_timeout_s + 1
    await group.check()
    assert not group.can_be_leased
    server.call_s = draft_group.MAX_CALL_S + 1
    with pytest.raises(EngineLostError, match="has not ended a call for 60 s"):
        await group.check()
    server.call_s, server.is_alive = 0.0, False
    with pytest.raises(EngineLostError, match="engine is broken"):
        await group.check()


async def test_a_group_of_which_one_rank_fails_does_not_start(said: list[str]) -> None:
    failing: Any = Followers(said, failure=ConfigError("draft.model is missing there"))
    with pytest.raises(ConfigError, match=r"draft\.model is missing there"):
        await DraftGroup(RANKS, failing).start()
    assert said == ["2 from rank 1", "ranks end"]


async def test_a_group_that_is_not_ready_in_time_does_not_start(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(workers, "start_draft", lambda *_, **__: never.wait(30))
    config = parse_config({"draft": {"tensor_parallel_size": 2}, "router": {"start_timeout_s": 0.05}})
    followers: Any = Followers(said)
    try:
        with pytest.raises(EngineLostError, match=r"the draft was not ready within 0\.05 s"):
            await DraftGroup(config, followers).start()
    finally:
        never.set()
    assert said == ["1 from rank 1", "ranks end"]


def test_a_rank_of_a_draft_loads_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Runner:
        def follow(self) -> None:
            raise EngineLostError("the leader is gone")

    def join(args: GroupArgs, meeting: str) -> str:
        seen.append((args.rank, args.world_size, meeting))
        return "group"

    def build(engine: EngineConfig, *, role: str, parallel: str) -> Runner:
        seen.append((engine.model, role, parallel))
        return Runner()

    monkeypatch.setattr(workers.ParallelContext, "join", join)
    monkeypatch.setattr(workers, "build_follower", build)
    draft = {"model": "small", "tensor_parallel_size": 3}
    config = parse_config({"draft": draft, "target": {"model": "large", "tensor_parallel_size": 2}})
    for role in ("draft", "target"):
        worker = workers.start_rank(config, role=role, rank=1, meeting="here", address="unix:/unused")
        assert (worker.address, worker.wait()) == (None, "the leader is gone")
    assert seen[:2] == [(1, 3, "here"), ("small", "draft", "group")]
    assert seen[2:] == [(1, 2, "here"), ("large", "target", "group")]


# ---- the replica


class Group:
    """Stands in for DraftGroup."""

    log: list[str]

    def __init__(self, config: Config, followers: object | None) -> None:
        self.config = config
        self._model = config.draft.model
        self._size = 1 if followers is None else config.draft.tensor_parallel_size
        self.server = Server([])

    async def start(self) -> None:
        self.log.append(f"{self._model} starts as {self._size}")

    async def stop(self, *, drain_s: float) -> None:
        self.log.append(f"{self._model} ends")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Group.log = []
    monkeypatch.setattr(draft_module, "DraftGroup", Group)
    monkeypatch.setattr(draft_module, "place_followers", lambda config: object())
    monkeypatch.setattr(draft_module, "keep_serve_on_loopback", lambda: None)
    monkeypatch.setattr(draft_module, "begin_logs", lambda config: None)
    return Group.log


class Replica(DraftReplica):
    async def end(self) -> None:
        """Replica's end, which Serve awaits."""
        await DraftReplica.__del__(self)

    def __del__(self) -> None:  # type: ignore[override]
        """Overrides the coroutine that Serve awaits; nobody does here."""


def replica(size: int) -> Replica:
    config = parse_config({"draft": {"model": "old", "tensor_parallel_size": size}})
    return Replica(config.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("size", "order"),
    [
        (1, ["old starts as 1", "new starts as 1", "old ends"]),
        # A process can be in one group at a time.
        (2, ["old starts as 2", "old ends", "new starts as 2"]),
    ],
)
async def test_another_model_takes_the_place_of_the_one_before(
    log: list[str], size: int, order: list[str]
) -> None:
    changing = replica(size)
    await changing.reconfigure({"draft": {}})
    await changing.reconfigure({"draft": {"tensor_parallel_size": size}})
    assert log == order[:1], "nothing has changed"
    await changing.reconfigure({"draft": {"model": "new"}})
    await asyncio.sleep(0)
    assert log == order
    await changing.end()
    assert log == [*order, "new ends"]


async def test_a_draft_that_has_just_come_is_not_judged_by_what_it_has_done_yet(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(draft_module, "time", SimpleNamespace(monotonic=lambda: now))
    coming = replica(1)
    assert await coming.record_autoscaling_stats() == {}
    await coming.reconfigure({"draft": {}})
    assert await coming.record_autoscaling_stats() == {"num_routers": 2.0}
    now += draft_module.UNJUDGED_S
    assert await coming.record_autoscaling_stats() == {"num_routers": 2.0, "busy_share": 0.5}
    await coming.reconfigure({"draft": {"model": "new"}})
    assert await coming.record_autoscaling_stats() == {"num_routers": 2.0}


async def test_nothing_is_leased_while_ranks_change_their_model(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = replica(2)
    await changing.reconfigure({"draft": {}})

    async def fail(group: Group) -> None:
        with pytest.raises(EngineLostError, match="not loaded yet"):
            await changing.lease()
        raise ConfigError("no such model")

    monkeypatch.setattr(Group, "start", fail)
    with pytest.raises(ConfigError, match="no such model"):
        await changing.reconfigure({"draft": {"model": "new"}})
    with pytest.raises(EngineLostError, match="not loaded yet"):
        await changing.lease()


async def test_a_deployment_has_room_for_its_number_of_ranks_only(log: list[str]) -> None:
    message = r"draft\.tensor_parallel_size 4; allowed: 2, for which the deployment has room"
    with pytest.raises(ConfigError, match=message):
        await replica(2).reconfigure({"draft": {"tensor_parallel_size": 4}})
    assert log == []
