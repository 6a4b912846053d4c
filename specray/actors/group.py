"""A tensor-parallel target as one thing: it starts as a whole or not at all, and fails as a whole."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specray.actors.target import TargetRank
from specray.config import Config, rank_environment
from specray.errors import EngineLostError

logger = logging.getLogger(__name__)

FIRST_RANK_BUNDLE = 1
"""Bundle 0 of the placement group is the Router's own."""
THREADS_PER_RANK = 4
"""One waits for the end of the rank, one runs checks, one starts or stops it."""


class TargetGroup:
    """The rank actors of one target, owned by the Router that created them and dying with it.

    Args:
        config: the whole configuration; every rank reads its own part.
        placement_group: holds the Router in bundle 0 and one rank in each of the others.
    """

    def __init__(self, config: Config, placement_group: PlacementGroup) -> None:
        size = config.target.tensor_parallel_size
        values = config.model_dump(mode="json")
        bundles = placement_group.bundle_specs[FIRST_RANK_BUNDLE : FIRST_RANK_BUNDLE + size]
        self._timeout_s = config.router.start_timeout_s
        actor_class: Any = ray.remote(TargetRank)
        self._ranks: list[Any] = [
            actor_class.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                runtime_env={"env_vars": rank_environment(config.rpc)},
                max_concurrency=THREADS_PER_RANK,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group, placement_group_bundle_index=FIRST_RANK_BUNDLE + rank
                ),
            ).remote(values, rank)
            for rank, bundle in enumerate(bundles)
        ]
        self._ends: list[ray.ObjectRef[Any]] = []

    async def start(self) -> str:
        """Loads every shard and returns the leader's address.

        Raises:
            EngineLostError: a rank failed, or not all were ready in time; none is left running.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                leader = self._ranks[0]
                meeting = await leader.open_store.remote() if len(self._ranks) > 1 else None
                addresses: list[str | None] = await asyncio.gather(
                    *(rank.start.remote(meeting) for rank in self._ranks)
                )
        except TimeoutError:
            self.stop()
            raise EngineLostError(f"the target was not ready within {self._timeout_s:g} s") from None
        except ray.exceptions.RayError as error:
            self.stop()
            raise EngineLostError(f"the target did not start: {error}") from error
        self._ends = [rank.wait.remote() for rank in self._ranks]
        return str(addresses[0])

    def failure(self) -> str | None:
        """Why the group can no longer work, or None while every rank is alive. Does not block."""
        ended, _ = ray.wait(self._ends, num_returns=1, timeout=0)
        if not ended:
            return None
        rank = self._ends.index(ended[0])
        try:
            reason = ray.get(ended[0], timeout=1)
        except ray.exceptions.RayError as error:
            reason = str(error).splitlines()[0]
        return f"target rank {rank} ended: {reason}"

    def stop(self) -> None:
        """Ends every rank; idempotent."""
        for rank in self._ranks:
            ray.kill(rank)
