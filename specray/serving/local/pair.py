"""Runs a pair without Ray: both workers as child processes on unix sockets, the router in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import yaml

from specray.config import Config, EngineConfig, RpcConfig
from specray.engine_info import EngineInfo
from specray.errors import ConfigError, EngineLostError
from specray.interfaces import Drafter, StopMatcherFactory
from specray.router import Router
from specray.rpc.connection import GrpcDrafter, GrpcVerifier

T = TypeVar("T", bound=EngineConfig)

WORKER_COMMAND = (sys.executable, "-m", "specray.cli", "worker")
CONNECT_TIMEOUT_S = 20.0
_MAX_ERROR_CHARS = 2000


class PeerDrafterSource:
    """interfaces.DrafterSource over one fixed address."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def lease(self) -> Drafter:
        return await GrpcDrafter.connect(self._address, timeout_s=CONNECT_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class LocalPair:
    """Addresses of a pair that runs on this machine."""

    target: str
    draft: str | None
    other_drafts: Mapping[str, str] = field(default_factory=dict)
    """Addresses of further drafts, by name."""

    def with_draft(self, name: str) -> LocalPair:
        """The target with another of the drafts; empty: as it is."""
        return replace(self, draft=self.other_drafts[name]) if name else self

    def router(self, config: Config, stop_matchers: StopMatcherFactory | None = None) -> Router:
        """Makes a router over the pair, not started yet; several may share the pair."""

        async def connect_target() -> GrpcVerifier:
            return await GrpcVerifier.connect(self.target, timeout_s=CONNECT_TIMEOUT_S)

        return Router(
            connect_target,
            None if self.draft is None else PeerDrafterSource(self.draft),
            router=config.router,
            speculation=config.speculation,
            model=config.model_name,
            stop_matchers=stop_matchers,
            draft=config.draft.kind_in_use,
        )

    async def infos(self) -> tuple[EngineInfo, EngineInfo | None]:
        verifier = await GrpcVerifier.connect(self.target, timeout_s=CONNECT_TIMEOUT_S)
        await verifier.close()
        if self.draft is None:
            return verifier.info, None
        drafter = await GrpcDrafter.connect(self.draft, timeout_s=CONNECT_TIMEOUT_S)
        await drafter.close()
        return verifier.info, drafter.info


@dataclass(frozen=True, slots=True)
class DraftHost:
    """Place of a draft that is reached over TCP, not over a unix socket."""

    address: str
    """Address of the draft (host:port), for the draft to listen on and the router to reach."""
    command: tuple[str, ...]
    """Prefix of a command that runs it at that place, as a child of this process."""


@asynccontextmanager
async def local_pair(
    config: Config,
    *,
    worker_command: Sequence[str] = WORKER_COMMAND,
    draft_host: DraftHost | None = None,
    other_drafts: Mapping[str, Config] | None = None,
) -> AsyncIterator[LocalPair]:
    """Starts both workers, and ends every process that it started when the block ends.

    Args:
        config: configuration of the engines; all ranks run on this machine.
        worker_command: command of a worker, before its role and options.
        draft_host: place of the draft; None: here, as the target. Whoever reaches its address can use it.
        other_drafts: configurations of further drafts, by name; their other sections are of no account.

    Raises:
        ConfigError: a model or a setting is wrong.
        EngineLostError: a worker did not start within start_timeout_s.
    """
    with tempfile.TemporaryDirectory(prefix="specray-") as name:
        directory = Path(name)
        config_path = directory / "config.yaml"
        # Private sockets of one process and its children: nobody else has to be kept out.
        config = sharing_gpu(config).model_copy(update={"rpc": RpcConfig()})
        config_path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        pair = LocalPair(f"unix:{directory / 'target'}.sock", None)
        commands: dict[str, tuple[Sequence[str], str]] = {"target": (worker_command, pair.target)}
        if config.draft.has_model:
            host = draft_host or DraftHost(f"unix:{directory / 'draft'}.sock", ())
            pair = replace(pair, draft=host.address)
            commands["draft"] = ((*host.command, *worker_command), host.address)
        names = other_drafts or {}
        pair = replace(pair, other_drafts={name: f"unix:{directory / name}.sock" for name in names})
        async with contextlib.AsyncExitStack() as stack:
            workers = [
                await stack.enter_async_context(start_worker(role, config_path, command, address))
                for role, (command, address) in commands.items()
            ]
            for name, other in names.items():
                path = directory / f"{name}.yaml"
                shared = sharing_gpu(other).model_copy(update={"rpc": RpcConfig()})
                path.write_text(yaml.safe_dump(shared.model_dump(mode="json")), encoding="utf-8")
                address = pair.other_drafts[name]
                worker = start_worker("draft", path, worker_command, address, log_name=name)
                workers.append(await stack.enter_async_context(worker))
            timeout_s = config.router.start_timeout_s
            await asyncio.gather(*(worker.wait_ready(timeout_s) for worker in workers))
            yield pair


def sharing_gpu(config: Config) -> Config:
    """Both engines are on this machine on purpose: each may use half of a GPU, unless something else is said.

    Ranks of a group have a GPU each.
    """
    if not config.draft.has_model:
        return config

    def halved(engine: T) -> T:
        options = engine.ray_actor_options
        if "num_gpus" in options or engine.tensor_parallel_size > 1:
            return engine
        return engine.model_copy(update={"ray_actor_options": {**options, "num_gpus": 0.5}})

    return config.model_copy(update={"target": halved(config.target), "draft": halved(config.draft)})


@asynccontextmanager
async def local_router(
    config: Config,
    *,
    stop_matchers: StopMatcherFactory | None = None,
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> AsyncIterator[Router]:
    """Starts the pair and a router over it while the block runs. Raises what ``local_pair`` raises."""
    async with local_pair(config, worker_command=worker_command) as pair:
        router = pair.router(config, stop_matchers)
        await router.start()
        try:
            yield router
        finally:
            await router.stop(drain=False)


class _Worker:
    def __init__(self, role: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self._role = role
        self._process = process
        self._log = log

    async def wait_ready(self, timeout_s: float) -> None:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise EngineLostError(f"the {self._role} worker did not start within {timeout_s:g} s") from None
        if not line:
            raise ConfigError(f"{self._role} worker: {_last_words(self._log.read_text('utf-8', 'replace'))}")

    async def end(self) -> None:
        for stop in (self._process.terminate, self._process.kill):
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                if self._process.returncode is None:
                    stop()
                async with asyncio.timeout(10.0):
                    await self._process.wait()
                return


def _last_words(text: str) -> str:
    """What a worker says of its end on stderr, without what libraries say before it."""
    own = [line for line in text.splitlines() if line.startswith("specray: ")]
    reason = own[-1].removeprefix("specray: ") if own else text.strip()[-_MAX_ERROR_CHARS:]
    return reason or "it ended without a word"


@asynccontextmanager
async def start_worker(
    role: str, config_path: Path, command: Sequence[str], address: str, *, log_name: str | None = None
) -> AsyncIterator[_Worker]:
    log = config_path.with_name(f"{log_name or role}.log")
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            role,
            f"--config={config_path}",
            f"--listen={address}",
            f"--parent-pid={os.getpid()}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            # This process passes a terminal's interrupt on, in order.
            start_new_session=True,
        )
    worker = _Worker(role, process, log)
    try:
        yield worker
    finally:
        await worker.end()
