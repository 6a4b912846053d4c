"""The ranks of a tensor-parallel target: one plain Ray actor each, in the Router's placement group."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

from specray.actors.node import interface_of, listen_address, listen_host
from specray.config import apply_interface_environment, parse_config
from specray.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from specray.actors.workers import FollowerWorker, LeaderWorker
    from specray.engine.parallel import GroupStore


class TargetRank:
    """One rank. The constructor is light: the model is loaded by ``start``, after every rank exists."""

    def __init__(self, values: dict[str, Any], rank: int) -> None:
        self._config = parse_config(values)
        configure_logging(self._config.logging, context={"deployment": "Target", "rank": str(rank)})
        self._rank = rank
        self._store: GroupStore | None = None
        self._worker: LeaderWorker | FollowerWorker | None = None

    def process(self) -> tuple[str, int]:
        """The node's id and this process's number."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def open_store(self) -> str:
        """On the leader: opens the store where the ranks meet, on a free port; returns its ``host:port``."""
        from specray.engine.parallel import GroupStore

        self._store = GroupStore(listen_host(self._config), timeout_s=self._config.router.start_timeout_s)
        return self._store.address

    def start(self, meeting: str | None) -> str | None:
        """Loads this rank's shard. The leader serves gRPC and returns its address, a follower None.

        Args:
            meeting: ``host:port`` of the leader's store; None for a target of one rank.
        """
        from specray.actors.workers import start_target_rank

        if self._config.rpc.listen == "node":
            # A machine may have interfaces on which the other nodes are not.
            interface = interface_of(listen_host(self._config))
            if interface is not None:
                apply_interface_environment(interface)
        self._worker = start_target_rank(
            self._config,
            rank=self._rank,
            meeting=self._store or meeting,
            address=listen_address(self._config, "target"),
        )
        return self._worker.address

    def wait(self) -> str:
        """Returns only when the rank can no longer work, and says why."""
        assert self._worker is not None, "wait comes after start"
        return self._worker.wait()

    def check(self) -> None:
        """On the leader: a real one-token step of the whole group. Raises EngineLostError."""
        assert self._worker is not None, "check comes after start"
        self._worker.check()

    def stop(self) -> None:
        """Ends the rank; idempotent."""
        if self._worker is not None:
            self._worker.stop()
