"""Runs a worker's tensor-parallel group without Ray: the other ranks are child processes on this machine."""

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

from specray.actors.targets.place import place_among
from specray.actors.workers import engine_config, join_group, take_place
from specray.config import Config, EngineConfig, parse_config
from specray.engine.build import build_follower
from specray.engine.device import choose_device, cores_per_rank, visible_gpus
from specray.engine.group.parallel import GroupStore
from specray.environment import apply_interface_environment
from specray.errors import ConfigError, EngineLostError
from specray.rpc.role import RoleName
from specray.serving.local.pair import WORKER_COMMAND

LOOPBACK = "127.0.0.1"
_POLL_S = 0.2
END_TIMEOUT_S = 5.0


@contextmanager
def local_ranks(
    config: Config, role: RoleName, *, worker_command: Sequence[str] = WORKER_COMMAND
) -> Iterator[GroupStore]:
    """Starts ranks 1 and up of the group that this process leads; they end when the block ends.

    If one of them ends earlier, this process gets SIGTERM, which is to end the block.

    Args:
        config: a configuration that ``sharing_cores`` returned.
        role: the engine.
        worker_command: command of a worker, before its role and options.

    Yields:
        The store at which the ranks meet.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        EngineLostError: a rank ended too early; raised after the block.
    """
    engine = engine_config(config, role)
    take_first_gpu(engine, role)
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
            followers.start(command)
        followers.watch()
        yield store
    if followers.failure is not None:
        raise EngineLostError(followers.failure)


def follow(config: Config, role: RoleName, rank: int, meeting: str) -> None:
    """Runs one of these ranks: loads its shard and repeats the leader's calls until the group closes.

    Args:
        meeting: address of the leader's store, ``host:port``.

    Raises:
        ConfigError: the model or a setting is wrong.
        EngineLostError: the group did not form, or the leader is lost.
    """
    apply_interface_environment("lo")
    engine = engine_config(config, role)
    # Rank 0 has the first of the same GPUs.
    gpus = () if engine.device == "cpu" else visible_gpus()[: engine.tensor_parallel_size]
    place = place_among(rank, gpus) if rank < len(gpus) else None
    take_place(place)
    parallel = join_group(config, role, rank, meeting, place)
    try:
        build_follower(engine, role=role, parallel=parallel).follow()
    finally:
        # Threads of a group that live when the interpreter ends can abort the process (SIGABRT).
        parallel.close()


def sharing_cores(config: Config, role: RoleName) -> Config:
    engine = engine_config(config, role)
    if engine.num_threads is not None or choose_device(engine).type != "cpu":
        return config
    values = config.model_dump(mode="json")
    values[role]["num_threads"] = cores_per_rank(engine)
    return parse_config(values)


def take_first_gpu(engine: EngineConfig, role: RoleName) -> None:
    """Takes the first GPU for this process, where ranks are to have one.

    CUDA may have been asked for its GPUs already: what it shows stays.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    if choose_device(engine).type != "cuda":
        return
    size, num_gpus = engine.tensor_parallel_size, len(visible_gpus())
    if num_gpus < size:
        raise ConfigError(
            f"{role}.tensor_parallel_size is {size}; allowed here: at most {num_gpus}, the GPUs that this "
            "process may use"
        )
    os.environ["LOCAL_RANK"] = "0"


class _Followers:
    """The child processes, and a thread that waits for the first of them to end."""

    def __init__(self, role: RoleName) -> None:
        self.failure: str | None = None
        """Reason why the group has failed; None: it has not."""
        self._role = role
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_ending = threading.Event()

    def start(self, command: Sequence[str]) -> None:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # This process passes a terminal's interrupt on, in order.
            start_new_session=True,
        )
        self._processes.append(process)

    def watch(self) -> None:
        threading.Thread(target=self._watch, name="specray-ranks", daemon=True).start()

    def end(self) -> None:
        """Ends all of them; those that the leader has let go end by themselves."""
        self._is_ending.set()
        for stop in (subprocess.Popen.terminate, subprocess.Popen.kill):
            self._wait()
            for process in self._processes:
                if process.returncode is None:
                    stop(process)
        self._wait()

    def _wait(self) -> None:
        end_s = time.monotonic() + END_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end_s - time.monotonic()))

    def _watch(self) -> None:
        while not self._is_ending.wait(_POLL_S):
            for rank, process in enumerate(self._processes, 1):
                # A rank that its leader has let go exits with 0.
                if status := process.poll():
                    self.failure = f"rank {rank} of the {self._role} has ended, with exit status {status}"
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
