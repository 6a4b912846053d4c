"""Engines as processes of their own, and as threads inside an actor."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, cast

from specray.errors import EngineLostError
from specray.interfaces import DraftEngine, TargetEngine
from specray.rpc.channel import ChannelOptions
from specray.rpc.event_loop import new_event_loop
from specray.rpc.loop_thread import LoopThread
from specray.rpc.role import RoleName
from specray.rpc.server import EngineServer, draft_server, target_server

EngineFactory = Callable[[], DraftEngine] | Callable[[], TargetEngine]


def engine_server(
    engine_factory: EngineFactory, *, role: RoleName, address: str, options: ChannelOptions | None = None
) -> EngineServer[Any, Any, Any]:
    """The server for an engine of the given role. Raises ConfigError for a wrong address."""
    if role == "draft":
        return draft_server(cast(Callable[[], DraftEngine], engine_factory), address, options=options)
    return target_server(cast(Callable[[], TargetEngine], engine_factory), address, options=options)


def serve_engine(
    engine_factory: EngineFactory,
    *,
    role: RoleName,
    address: str,
    start_timeout_s: float = 600.0,
    grace_s: float = 5.0,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serves an engine in this process, on the main thread, until SIGINT or SIGTERM.

    Args:
        engine_factory: called once, on the engine thread; everything of the engine happens there.
        address: ``unix:/path`` or ``host:port``; port 0 takes a free one.
        grace_s: at the end, requests in hand are answered for at most so many seconds.
        on_ready: called with the real address once the server answers; default: prints it.

    Raises:
        ConfigError: the address is wrong, in use or not writable; or what the factory raises.
        EngineLostError: the engine broke or was not loaded in time.
    """
    server = engine_server(engine_factory, role=role, address=address)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(server, start_timeout_s, grace_s, on_ready or _printer(role)))


async def _serve(
    server: EngineServer[Any, Any, Any],
    start_timeout_s: float,
    grace_s: float,
    on_ready: Callable[[str], None],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    started = asyncio.create_task(server.start(timeout_s=start_timeout_s))
    try:
        await asyncio.wait({started, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
            return
        on_ready(started.result())
        broken = asyncio.create_task(server.wait_broken())
        await asyncio.wait({broken, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            raise broken.result()
        broken.cancel()
    finally:
        stopped.cancel()
        await server.stop(grace_s)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _printer(role: RoleName) -> Callable[[str], None]:
    return lambda address: print(f"specray {role} worker listens on {address}", flush=True)


class EngineServerThread:
    """An engine server for use inside a Ray actor: its event loop and its engine have a thread each.

    Methods are called from any other thread and block for at most their time-outs.
    """

    def __init__(
        self,
        engine_factory: EngineFactory,
        *,
        role: RoleName,
        address: str,
        options: ChannelOptions | None = None,
    ) -> None:
        """Raises ConfigError for a wrong address; nothing runs before ``start``."""
        self._server = engine_server(engine_factory, role=role, address=address, options=options)
        self._role = role
        self._loop_thread: LoopThread | None = None

    @property
    def is_alive(self) -> bool:
        """True while the server runs and its engine is not broken; costs nothing."""
        return self._loop_thread is not None and self._loop_thread.is_alive and self._server.is_serving

    def start(self, *, timeout_s: float = 600.0) -> str:
        """Loads the engine and listens; returns the address, with the real port.

        Raises:
            ConfigError: the address is in use or not writable; or what the engine's factory raises.
            EngineLostError: the engine was not loaded within ``timeout_s`` seconds.
        """
        self._loop_thread = LoopThread(f"specray-{self._role}-server")
        try:
            return self._loop_thread.run(self._server.start(timeout_s=timeout_s), timeout_s=timeout_s + 5.0)
        except BaseException:
            self.stop(grace_s=0.0)
            raise

    def check(self, *, timeout_s: float) -> None:
        """Runs the engine's real step. Raises EngineLostError when it fails or needs longer."""
        if self._loop_thread is None:
            raise EngineLostError(f"the {self._role} server does not run")
        self._loop_thread.run(self._server.check(timeout_s=timeout_s), timeout_s=timeout_s + 1.0)

    def stop(self, *, grace_s: float = 5.0) -> None:
        """Answers what is in hand for at most ``grace_s`` seconds, then ends both threads; idempotent."""
        thread, self._loop_thread = self._loop_thread, None
        if thread is None:
            return
        try:
            thread.run(self._server.stop(grace_s), timeout_s=2 * grace_s + 5.0)
        finally:
            thread.stop()
