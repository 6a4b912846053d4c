"""A worker's tensor-parallel group without Ray: the other ranks are child processes, on the same machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from specray.actors.workers import engine_config, join_group
from specray.config import Config, EngineConfig, parse_config
from specray.engine.build import build_follower
from specray.engine.runner.device import choose_device, cores_per_rank, visible_gpus
from specray.engine.runner.parallel import GroupStore
from specray.environment import apply_interface_environment
from specray.errors import ConfigError, EngineLostError
from specray.rpc.role import RoleName
from specray.serving.local.pair import WORKER_COMMAND

LOOPBACK = "127.0.0.1"
_POLL_S = 0.2
_END_TIMEOUT_S = 5.0


@contextmanager
def local_ranks(
    config: Config, role: RoleName, *, worker_command: Sequence[str] = WORKER_COMMAND
) -> Iterator[GroupStore]:
    """Starts ranks 1 and up of the group that this process leads; when the block ends, so do they.

    The group is one thing: when one of them ends before the block does, this process gets SIGTERM, which is
    to end the block.

    Args:
        config: as ``sharing_cores`` gives it.
        worker_command: what starts a worker, before its role and options.

    Yields:
        Where the ranks meet.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        EngineLostError: after the block: a rank has ended too early.
    """
    engine = engine_config(config, role)
    environments = _environments(engine, role)
    apply_interface_environment("lo")
    store = GroupStore(LOOPBACK, timeout_s=config.router.start_timeout_s)
    with tempfile.TemporaryDirectory(prefix="specray-") as directory, contextlib.ExitStack() as stack:
        path = Path(directory, "config.yaml")
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        followers = _Followers(role)
        stack.callback(followers.end)
        for rank in range(1, engine.tensor_parallel_size):
            arguments = (f"--config={path}", f"--rank={rank}", f"--meeting={store.address}")
            command = (*worker_command, role, *arguments, f"--parent-pid={os.getpid()}")
            followers.start(command, environments[rank])
        followers.watch()
        yield store
    if followers.failure is not None:
        raise EngineLostError(followers.failure)


def follow(config: Config, role: RoleName, rank: int, meeting: str) -> None:
    """One of these ranks: loads its shard and runs what the leader runs, until the leader closes the group.

    Args:
        meeting: ``host:port`` of the leader's store.

    Raises:
        ConfigError: the model or a setting is wrong.
        EngineLostError: the group did not form, or the leader is lost.
    """
    apply_interface_environment("lo")
    parallel = join_group(config, role, rank, meeting)
    try:
        build_follower(engine_config(config, role), role=role, parallel=parallel).follow()
    finally:
        # A group's threads that are there when the interpreter ends can end the process with SIGABRT.
        parallel.close()


def sharing_cores(config: Config, role: RoleName) -> Config:
    """The configuration in which the group's ranks share this machine's cores, unless it says otherwise."""
    engine = engine_config(config, role)
    if engine.num_threads is not None or choose_device(engine).type != "cpu":
        return config
    values = config.model_dump(mode="json")
    values[role]["num_threads"] = cores_per_rank(engine)
    return parse_config(values)


def _environments(engine: EngineConfig, role: RoleName) -> list[dict[str, str]]:
    """What each rank finds in its environment beside our own: which GPU is its device 0."""
    size = engine.tensor_parallel_size
    if choose_device(engine).type != "cuda":
        return [{}] * size
    gpus = visible_gpus()
    if len(gpus) < size:
        raise ConfigError(
            f"{role}.tensor_parallel_size is {size}; allowed here: at most {len(gpus)}, the GPUs that this "
            "process may use"
        )
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:size]]


class _Followers:
    """The child processes, and a thread that waits for the first of them to end."""

    def __init__(self, role: RoleName) -> None:
        self.failure: str | None = None
        """Why the group is none any more."""
        self._role = role
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_ending = threading.Event()

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **environment},
            # An interrupt at the terminal is ours to pass on, in order.
            start_new_session=True,
        )
        self._processes.append(process)

    def watch(self) -> None:
        threading.Thread(target=self._watch, name="specray-ranks", daemon=True).start()

    def end(self) -> None:
        """Leaves none behind: those whose leader has let them go end by themselves."""
        self._is_ending.set()
        for stop in (subprocess.Popen.terminate, subprocess.Popen.kill):
            self._wait()
            for process in self._processes:
                if process.returncode is None:
                    stop(process)
        self._wait()

    def _wait(self) -> None:
        """Until all have ended, for at most ``_END_TIMEOUT_S`` together."""
        end_s = time.monotonic() + _END_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end_s - time.monotonic()))

    def _watch(self) -> None:
        while not self._is_ending.wait(_POLL_S):
            for rank, process in enumerate(self._processes, 1):
                # One that its leader has let go ends with 0.
                if status := process.poll():
                    self.failure = f"rank {rank} of the {self._role} has ended, with exit status {status}"
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
