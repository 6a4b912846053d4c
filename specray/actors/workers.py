"""Composition root of workers: builds an engine and its server."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from specray.config import Config, EngineConfig
from specray.engine.build import build_draft_engine, build_follower, build_target_engine
from specray.engine.device import choose_device, show_gpus, use_device
from specray.engine.group.parallel import GroupArgs, GroupStore, ParallelContext
from specray.engine.runner.runner import ModelRunner
from specray.errors import SpecrayError
from specray.rpc.channel import channel_options
from specray.rpc.role import RoleName
from specray.rpc.workers.worker import EngineServerThread

if TYPE_CHECKING:
    from specray.actors.targets.place import GpuPlace

ENGINE_NICENESS = 5
MIN_SILENCE_S = 30.0
"""Minimum seconds that ranks wait for each other. The first steps of a rank on a busy machine take seconds,
and the router ends a group that hangs anyway."""


def let_callers_go_first(config: EngineConfig) -> None:
    """Lowers the priority of this thread, and of those it starts, if the engine computes on the CPU.

    An engine uses all cores it gets. Router and Ingress need little time, but at once: measured on 2 cores at
    ten times the load, the 99th percentile of refusals fell from 400 ms to 160.
    """
    if choose_device(config).type == "cpu":
        niceness = max(os.getpriority(os.PRIO_PROCESS, 0), ENGINE_NICENESS)
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


def start_draft(
    config: Config, *, address: str, meeting: GroupStore | None = None, place: GpuPlace | None = None
) -> tuple[EngineServerThread, str]:
    """Loads the draft and serves it at ``address``, ``unix:/path`` or ``host:0``.

    Args:
        meeting: rendezvous store of the other ranks, led by this one; None for a draft with one rank.
        place: what this rank is to see of its node's GPUs; None: what it sees already.

    Returns:
        The server and its address, with the real port.

    Raises:
        ConfigError: the model or a setting is wrong.
        EngineLostError: the group did not form, or the engine was not loaded in time.
    """
    take_place(place)
    let_callers_go_first(config.draft)
    parallel = None if meeting is None else join_group(config, "draft", 0, meeting, place)
    server = EngineServerThread(
        lambda: build_draft_engine(config, parallel=parallel),
        role="draft",
        address=address,
        options=channel_options(config.rpc),
    )
    return server, server.start(timeout_s=config.router.start_timeout_s)


class LeaderWorker:
    """Rank 0 of a target: serves gRPC, samples, and sends steps to the other ranks."""

    def __init__(self, config: Config, parallel: ParallelContext | None, *, address: str) -> None:
        self._server = EngineServerThread(
            lambda: build_target_engine(config, parallel=parallel),
            role="target",
            address=address,
            options=channel_options(config.rpc),
        )
        self._ended = threading.Event()
        self.address: str | None = self._server.start(timeout_s=config.router.start_timeout_s)

    def wait(self) -> str:
        """Waits until the engine is broken or stopped; returns which."""
        while not self._ended.wait(timeout=0.5):
            if not self._server.is_alive:
                return "its engine is broken"
        return "stopped"

    def check(self) -> None:
        """Runs a real one-token step of the whole group. Raises EngineLostError."""
        self._server.check(timeout_s=20.0)

    def stop(self) -> None:
        self._ended.set()
        self._server.stop()


class FollowerWorker:
    """Another rank: runs the leader's steps until the leader closes or is silent for too long."""

    address: str | None = None

    def __init__(self, config: Config, role: RoleName, parallel: ParallelContext) -> None:
        self._runner: ModelRunner = build_follower(engine_config(config, role), role=role, parallel=parallel)
        self._reason = "the leader closed the group"
        self._thread = threading.Thread(target=self._follow, name="specray-follower", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Waits until the rank no longer follows; returns the reason."""
        self._thread.join()
        return self._reason

    def check(self) -> None:
        """Does nothing: the leader's step checks followers."""

    def stop(self) -> None:
        self._runner.close()

    def _follow(self) -> None:
        try:
            self._runner.follow()
        except SpecrayError as error:
            self._reason = str(error)


def engine_config(config: Config, role: RoleName) -> EngineConfig:
    return config.draft if role == "draft" else config.target


def take_place(place: GpuPlace | None) -> None:
    """Makes CUDA show this process the GPUs of its place; call it before anything asks CUDA.

    Raises:
        EngineLostError: CUDA shows other GPUs already.
    """
    if place is not None:
        show_gpus(place.gpus, place.local_rank)


def join_group(
    config: Config,
    role: RoleName,
    rank: int,
    meeting: GroupStore | str,
    place: GpuPlace | None = None,
) -> ParallelContext:
    """Joins the other ranks. Raises EngineLostError when not all join within ``router.start_timeout_s``."""
    engine = engine_config(config, role)
    gpu_index = None if place is None else place.gpu_index
    device = choose_device(engine, gpu_index)
    use_device(device)
    args = GroupArgs(
        rank=rank,
        world_size=engine.tensor_parallel_size,
        device_type=device.type,
        gpu_index=gpu_index,
        start_timeout_s=config.router.start_timeout_s,
        silence_timeout_s=max(MIN_SILENCE_S, config.router.verify_timeout_s),
    )
    return ParallelContext.join(args, meeting)


def start_rank(
    config: Config,
    *,
    role: RoleName,
    rank: int,
    meeting: GroupStore | str | None,
    address: str,
    place: GpuPlace | None = None,
) -> LeaderWorker | FollowerWorker:
    """Joins the group, loads this rank's shard and starts its part of the work.

    Args:
        rank: rank in the group; 0 leads a target. A draft's leader starts by :func:`start_draft`.
        meeting: rendezvous: on the leader its own store, on the others the store's ``host:port``; None for a
            target with one rank.
        address: address on which the leader listens, ``unix:/path`` or ``host:0``.
        place: what this rank is to see of its node's GPUs; None: what it sees already.

    Raises:
        ConfigError: the model or a setting is wrong.
        EngineLostError: the group did not form, or the engine was not loaded in time.
    """
    take_place(place)
    let_callers_go_first(engine_config(config, role))
    parallel = None if meeting is None else join_group(config, role, rank, meeting, place)
    if rank == 0:
        assert role == "target", "the leader of a draft's ranks is its replica"
        return LeaderWorker(config, parallel, address=address)
    assert parallel is not None, "a follower needs a group"
    return FollowerWorker(config, role, parallel)
