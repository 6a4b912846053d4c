"""Rank actors of tensor-parallel groups, one plain Ray actor each in their owner's placement group."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from specray.actors.node import listen_address, listen_host, meet_on_own_interface, memory_bytes
from specray.actors.targets.place import GpuPlace, RankProcess
from specray.config import parse_config
from specray.environment import apply_rank_environment
from specray.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from specray.actors.workers import FollowerWorker, LeaderWorker
    from specray.engine.group.parallel import GroupStore
    from specray.rpc.role import RoleName


def own_process() -> RankProcess:
    gpu_ids = tuple(str(gpu_id) for gpu_id in ray.get_gpu_ids())
    return RankProcess(ray.get_runtime_context().get_node_id(), os.getpid(), gpu_ids)


class Rank:
    """One rank. The constructor is light: ``start`` loads the model, after every rank exists.

    Subclasses set the ``role``; Ray names the process after the class.
    """

    role: ClassVar[RoleName]

    def __init__(self, values: dict[str, Any], rank: int) -> None:
        self._config = parse_config(values)
        apply_rank_environment(self._config.rpc)
        configure_logging(
            self._config.logging, context={"deployment": self.role.capitalize(), "rank": str(rank)}
        )
        self._rank = rank
        self._store: GroupStore | None = None
        self._worker: LeaderWorker | FollowerWorker | None = None

    def process(self) -> RankProcess:
        """Returns the rank's process, even while it loads or works; a rank that does not answer hangs."""
        return own_process()

    def memory_bytes(self) -> int:
        """See ``actors.node``."""
        return memory_bytes()

    def open_store(self) -> str:
        """Opens the rendezvous store on the leader, on a free port; returns its ``host:port``."""
        from specray.engine.group.parallel import GroupStore

        self._store = GroupStore(listen_host(self._config), timeout_s=self._config.router.start_timeout_s)
        return self._store.address

    def start(self, meeting: str | None, place: GpuPlace | None = None) -> str | None:
        """Loads this rank's shard. The leader serves gRPC and returns its address, a follower None.

        Args:
            meeting: ``host:port`` of the leader's rendezvous store; None for a group of one rank.
            place: what this rank is to see of its node's GPUs; None: what Ray shows it.
        """
        from specray.actors.workers import start_rank

        meet_on_own_interface(self._config)
        self._worker = start_rank(
            self._config,
            role=self.role,
            rank=self._rank,
            meeting=self._store or meeting,
            address=listen_address(self._config, self.role),
            place=place,
        )
        return self._worker.address

    def wait(self) -> str:
        assert self._worker is not None, "wait comes after start"
        return self._worker.wait()

    def check(self) -> None:
        assert self._worker is not None, "check comes after start"
        self._worker.check()

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()


class TargetRank(Rank):
    """Rank of a target, in the Router's placement group."""

    role = "target"


class DraftRank(Rank):
    """Rank of a draft, in the placement group of a Draft replica, which is rank 0 itself."""

    role = "draft"
