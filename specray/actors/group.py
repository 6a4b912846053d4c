"""A tensor-parallel target as one thing: it starts as a whole or not at all, and ends as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specray.actors.node import LocalProcess
from specray.actors.placement import rank_bundles
from specray.actors.target import TargetRank
from specray.config import Config, rank_environment
from specray.errors import ConfigError, EngineLostError

THREADS_PER_RANK = 4
"""One waits for the end of the rank, one runs checks, one starts or stops it."""
PLACED_POLL_S = 1.0


class TargetGroup:
    """The rank actors of one target, owned by the Router that created them and dying with it.

    Used once: after ``stop`` another group takes its place in the placement group.

    Args:
        config: the whole configuration; every rank reads its own part.
        placement_group: holds the Router in bundle 0 and one rank in each of the others.
    """

    def __init__(self, config: Config, placement_group: PlacementGroup) -> None:
        self._config = config
        self._values = config.model_dump(mode="json")
        self._placement_group = placement_group
        self._ranks: list[Any] = []
        self._processes: list[LocalProcess] = []
        """Those on this node."""
        self._socket: Path | None = None

    async def start(self) -> str:
        """Places the ranks, loads every shard and returns the leader's address.

        Raises:
            ConfigError: a setting is wrong, as a rank or the placement has found; no rank is left running.
            EngineLostError: a rank failed, or not all were ready in time; none is left running.
        """
        timeout_s = self._config.router.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._start()
        except TimeoutError:
            self.stop()
            raise EngineLostError(f"the target was not ready within {timeout_s:g} s") from None
        except ray.exceptions.RayTaskError as error:
            self.stop()
            if isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise EngineLostError(f"the target did not start: {error}") from error
        except ray.exceptions.RayError as error:
            self.stop()
            raise EngineLostError(f"the target did not start: {error}") from error
        except BaseException:
            self.stop()
            raise

    async def processes(self) -> list[tuple[str, int]]:
        """Node id and process number of each rank, in order; once they are placed.

        Raises:
            ray.exceptions.RayError: a rank is gone.
        """
        return list(await asyncio.gather(*(rank.process.remote() for rank in self._ranks)))

    async def ended(self) -> str:
        """Returns when the first rank can no longer work, and says why; after ``start``."""
        ends = [asyncio.ensure_future(_end(rank, actor)) for rank, actor in enumerate(self._ranks)]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for end in ends:
                end.cancel()

    async def check(self) -> None:
        """A real one-token step of the whole group; the caller sets the deadline.

        Raises:
            EngineLostError: a rank is gone or its engine is broken.
        """
        try:
            await self._ranks[0].check.remote()
        except ray.exceptions.RayError as error:
            raise EngineLostError(_first_line(error)) from None

    def stop(self) -> None:
        """Ends every rank, also one that hangs; idempotent. What they held is free once they are gone."""
        for process in self._processes:
            process.kill()
        for rank in self._ranks:
            ray.kill(rank)
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    async def _start(self) -> str:
        nodes = await self._bundle_nodes()
        bundles = rank_bundles(nodes, self._config.target.tensor_parallel_size)
        if self._config.rpc.listen == "loopback":
            check_one_host({nodes[0], *(nodes[bundle] for bundle in bundles)}, ray.nodes())
        self._ranks = [self._create(rank, bundle) for rank, bundle in enumerate(bundles)]
        await self._find_processes()
        leader = self._ranks[0]
        meeting = await leader.open_store.remote() if len(self._ranks) > 1 else None
        addresses = await asyncio.gather(*(rank.start.remote(meeting) for rank in self._ranks))
        address = str(addresses[0])
        if address.startswith("unix:"):
            self._socket = Path(address.removeprefix("unix:"))
        return address

    async def _find_processes(self) -> None:
        own = ray.get_runtime_context().get_node_id()
        for node, pid in await self.processes():
            if node == own:
                with contextlib.suppress(OSError):  # It has ended already, as its next call will show.
                    self._processes.append(LocalProcess(pid))

    async def _bundle_nodes(self) -> dict[int, str]:
        """The node of each bundle, once each has one: Ray finds another for those whose node is gone."""
        group = self._placement_group
        while not await asyncio.to_thread(group.wait, PLACED_POLL_S):
            pass
        nodes: dict[int, str] = (await asyncio.to_thread(placement_group_table, group))["bundles_to_node_id"]
        return nodes

    def _create(self, rank: int, bundle: int) -> Any:
        resources = dict(self._placement_group.bundle_specs[bundle])
        actor_class: Any = ray.remote(TargetRank)
        return actor_class.options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            memory=resources.pop("memory", None),
            resources=resources or None,
            max_restarts=0,
            runtime_env={"env_vars": rank_environment(self._config.rpc)},
            max_concurrency=THREADS_PER_RANK,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._placement_group, placement_group_bundle_index=bundle
            ),
        ).remote(self._values, rank)


def check_one_host(node_ids: set[str], nodes: Sequence[dict[str, Any]]) -> None:
    """Nobody beyond a machine can reach its loopback interface.

    Args:
        node_ids: where the group is.
        nodes: as Ray lists them.

    Raises:
        ConfigError: the group is on several machines.
    """
    hosts = sorted({str(node["NodeManagerAddress"]) for node in nodes if node["NodeID"] in node_ids})
    if len(hosts) > 1:
        raise ConfigError(
            f"rpc.listen is 'loopback', but the target's ranks are on {', '.join(hosts)}; allowed: 'node', "
            "or target.placement 'one-node'"
        )


async def _end(rank: int, actor: Any) -> str:
    try:
        reason = await actor.wait.remote()
    except ray.exceptions.RayError as error:
        reason = _first_line(error)
    return f"target rank {rank} ended: {reason}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
