"""Tensor-parallel groups of rank actors: a group starts as a whole or not at all, and ends as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specray.actors.node import LocalProcess
from specray.actors.targets.place import GpuPlace, RankProcess, check_own_gpus, gpu_places
from specray.actors.targets.placement import actor_options, rank_bundles
from specray.actors.targets.ranks import Rank, TargetRank, own_process
from specray.config import Config
from specray.errors import ConfigError, EngineLostError

END_TIMEOUT_S = 1.0
SILENCE_PERIOD_S, SILENCE_S, MAX_SILENT = 1.0, 4.0, 3
"""Seconds between two calls of every rank's process, seconds for the answers, and how many calls without one
make a hung rank: its other threads answer while its engine works."""


@asynccontextmanager
async def starting(role: str, timeout_s: float, stop: Callable[[], None]) -> AsyncIterator[None]:
    """Context of a group's start: a failure within it ends the group by ``stop``.

    Raises:
        ConfigError: a rank or the placement found a wrong setting.
        EngineLostError: a rank failed, or not all were ready within ``timeout_s``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        stop()
        raise EngineLostError(f"the {role} was not ready within {timeout_s:g} s") from None
    except ray.exceptions.RayTaskError as error:
        stop()
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise EngineLostError(f"the {role} did not start: {error}") from error
    except ray.exceptions.RayError as error:
        stop()
        raise EngineLostError(f"the {role} did not start: {error}") from error
    except BaseException:
        stop()
        raise


class PlacedRanks:
    """Rank actors in bundles of a placement group, owned by the process that made them and dying with it.

    Not reusable: after ``stop`` make others for the same placement group.

    Args:
        config: the whole configuration; every rank reads its own part.
        actor_class: class of the rank actors.
        placement_group: has the owner in bundle 0 and one rank in each other bundle.
    """

    def __init__(self, config: Config, actor_class: type[Rank], placement_group: PlacementGroup) -> None:
        self._config = config
        self._actor_class = actor_class
        self._placement_group = placement_group
        self._first_rank = 0
        self._processes: list[LocalProcess] = []
        """Rank processes on this node."""
        self._places: list[GpuPlace | None] = []
        """What each actor sees of its node's GPUs; after ``place``."""
        self.own_place: GpuPlace | None = None
        """What the owner is to see of its node's GPUs, if it is a rank itself; after ``place``."""
        self.actors: list[Any] = []

    async def place(self, num_ranks: int, *, first_rank: int = 0) -> None:
        """Creates the actors, which load nothing yet.

        Args:
            first_rank: rank of the first actor; lower ranks run in the owner.

        Raises:
            ConfigError: the actors cannot form a group where they are.
            ray.exceptions.RayError: an actor is gone.
        """
        nodes = await self._bundle_nodes()
        bundles = rank_bundles(nodes, num_ranks)
        role = self._actor_class.role
        if self._config.rpc.listen == "loopback":
            check_one_host({nodes[0], *(nodes[bundle] for bundle in bundles)}, ray.nodes(), role=role)
        self._first_rank = first_rank
        self.actors = [self._create(rank, bundle) for rank, bundle in enumerate(bundles, first_rank)]
        placed = await self.processes()
        self._find_local(placed)
        ranks = [*([own_process()] if first_rank else []), *placed]
        check_own_gpus(ranks, role=role)
        places = gpu_places(ranks)
        self.own_place = places[0] if first_rank else None
        self._places = places[len(ranks) - len(placed) :]

    async def start(self, meeting: str | None) -> list[str | None]:
        """Loads every shard and returns each rank's address. Raises what ``Rank.start`` raises."""
        return list(
            await asyncio.gather(
                *(
                    actor.start.remote(meeting, place)
                    for actor, place in zip(self.actors, self._places, strict=True)
                )
            )
        )

    async def processes(self) -> list[RankProcess]:
        """Process of each rank, in rank order; after placement.

        Raises:
            ray.exceptions.RayError: a rank is gone.
        """
        return list(await asyncio.gather(*(actor.process.remote() for actor in self.actors)))

    async def memory_bytes(self) -> int:
        """Bytes of all ranks. Raises ray.exceptions.RayError: a rank is gone."""
        return sum(await asyncio.gather(*(actor.memory_bytes.remote() for actor in self.actors)))

    async def ended(self) -> str:
        """Waits until a rank can no longer work, or hangs; returns the reason. Call after ``start``."""
        ends = [asyncio.ensure_future(self._end(rank)) for rank in range(len(self.actors))]
        ends.append(asyncio.ensure_future(self._silence()))
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for end in ends:
                end.cancel()

    def stop(self) -> None:
        """Kills every rank, even one that hangs; idempotent. Returns once their resources are free."""
        for process in self._processes:
            process.kill()
        for actor in self.actors:
            ray.kill(actor)

    async def end(self) -> None:
        """Ends working ranks in order, so that Ray reports no failure; idempotent.

        A rank that has not ended within ``END_TIMEOUT_S`` is killed as by ``stop``.
        """
        for actor in self.actors:
            ray.kill(actor)
        await asyncio.gather(*(process.wait(END_TIMEOUT_S) for process in self._processes))
        self.stop()

    async def _end(self, index: int) -> str:
        try:
            reason = await self.actors[index].wait.remote()
        except ray.exceptions.RayError as error:
            reason = first_line(error)
        return f"{self._actor_class.role} rank {self._first_rank + index} ended: {reason}"

    async def _silence(self) -> str:
        """Waits until a rank's process does not answer, whatever its engine does; returns the reason."""
        num_silent = 0
        while num_silent < MAX_SILENT:
            await asyncio.sleep(SILENCE_PERIOD_S)
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self.processes()
            except TimeoutError:
                num_silent += 1
            # It has ended, as ``_end`` says.
            except ray.exceptions.RayError:
                pass
            else:
                num_silent = 0
        return f"a rank of the {self._actor_class.role} has not answered {MAX_SILENT} times in a row"

    def _find_local(self, placed: Sequence[RankProcess]) -> None:
        own = ray.get_runtime_context().get_node_id()
        for process in placed:
            if process.node_id == own:
                with contextlib.suppress(OSError):  # It has ended already, as its next call will show.
                    self._processes.append(LocalProcess(process.pid))

    async def _bundle_nodes(self) -> dict[int, str]:
        """Node of each bundle, once all have one: Ray reschedules bundles whose node is gone."""
        group = self._placement_group
        while not await asyncio.to_thread(group.wait, 1.0):
            pass
        nodes: dict[int, str] = (await asyncio.to_thread(placement_group_table, group))["bundles_to_node_id"]
        return nodes

    def _create(self, rank: int, bundle: int) -> Any:
        actor_class: Any = ray.remote(self._actor_class)
        return actor_class.options(
            **actor_options(self._placement_group.bundle_specs[bundle]),
            max_restarts=0,
            # Threads of a rank actor: one waits for the rank's end, one runs checks, one starts or stops it;
            # one spare.
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._placement_group, placement_group_bundle_index=bundle
            ),
        ).remote(self._config.model_dump(mode="json"), rank)


class TargetGroup:
    """The ranks of one target, owned by the Router that created them and dying with it.

    Not reusable: after ``stop`` make another group for the same placement group.

    Args:
        config: the whole configuration; every rank reads its own part.
        placement_group: has the Router in bundle 0 and one rank in each other bundle.
    """

    def __init__(self, config: Config, placement_group: PlacementGroup) -> None:
        self._config = config
        self._ranks = PlacedRanks(config, TargetRank, placement_group)
        self._socket: Path | None = None

    async def start(self) -> str:
        """Places the ranks, loads every shard and returns the leader's address.

        Raises:
            ConfigError: a rank or the placement found a wrong setting; no rank is left running.
            EngineLostError: a rank failed, or not all were ready in time; none is left running.
        """
        async with starting("target", self._config.router.start_timeout_s, self.stop):
            await self._ranks.place(self._config.target.tensor_parallel_size)
            leader, *followers = self._ranks.actors
            meeting = await leader.open_store.remote() if followers else None
            address = str((await self._ranks.start(meeting))[0])
        if address.startswith("unix:"):
            self._socket = Path(address.removeprefix("unix:"))
        return address

    async def processes(self) -> list[RankProcess]:
        return await self._ranks.processes()

    async def memory_bytes(self) -> int:
        """See PlacedRanks."""
        return await self._ranks.memory_bytes()

    async def ended(self) -> str:
        return await self._ranks.ended()

    async def check(self) -> None:
        """Runs a real one-token step of the whole group; the caller sets the deadline.

        Raises:
            EngineLostError: a rank is gone or its engine is broken.
        """
        try:
            await self._ranks.actors[0].check.remote()
        except ray.exceptions.RayError as error:
            raise EngineLostError(first_line(error)) from None

    def stop(self) -> None:
        self._ranks.stop()
        self._remove_socket()

    async def end(self) -> None:
        await self._ranks.end()
        self._remove_socket()

    def _remove_socket(self) -> None:
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)


def check_one_host(node_ids: set[str], nodes: Sequence[dict[str, Any]], *, role: str) -> None:
    """Checks that a group listening on loopback is on one machine, since others cannot reach it there.

    Args:
        node_ids: nodes of the group.
        nodes: all nodes, as Ray lists them.

    Raises:
        ConfigError: the group is on several machines.
    """
    hosts = sorted({str(node["NodeManagerAddress"]) for node in nodes if node["NodeID"] in node_ids})
    if len(hosts) > 1:
        raise ConfigError(
            f"rpc.listen is 'loopback', but the {role}'s ranks are on {', '.join(hosts)}; allowed: 'node', "
            f"or {role}.placement 'one-node'"
        )


def first_line(error: Exception) -> str:
    """Message of a Ray error, without its traceback."""
    return (str(error).splitlines() or [type(error).__name__])[0]
