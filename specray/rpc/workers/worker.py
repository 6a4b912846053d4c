"""Worker: an engine with its server on one thread, inside an actor or as a process of its own."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specray.engine_info import EngineInfo
from specray.errors import EngineLostError
from specray.rpc.channel import ChannelOptions
from specray.rpc.loop_thread import LoopThread, NoAnswerError
from specray.rpc.role import RoleName
from specray.rpc.workers.server import EngineFactory, engine_server

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


def serve_engine(
    engine_factory: EngineFactory,
    *,
    role: RoleName,
    address: str,
    start_timeout_s: float = 600.0,
    grace_s: float = 5.0,
    on_ready: Callable[[str], None] | None = None,
    options: ChannelOptions | None = None,
) -> None:
    """Serves an engine in this process, called on its main thread, until SIGINT or SIGTERM.

    Args:
        engine_factory: called once, on the server's thread, where all engine calls happen.
        address: ``unix:/path`` or ``host:port``; port 0 takes a free one.
        grace_s: maximum seconds to answer pending requests at the end.
        on_ready: called with the real address once the server answers; default: prints it.

    Raises:
        ConfigError: the address is wrong, in use or not writable; or what the factory raises.
        EngineLostError: the engine broke or was not loaded in time.
    """
    server = EngineServerThread(engine_factory, role=role, address=address, options=options)
    with _interrupted_by(signal.SIGINT, signal.SIGTERM), contextlib.suppress(KeyboardInterrupt):
        try:
            (on_ready or _printer(role))(server.start(timeout_s=start_timeout_s))
            raise server.wait_broken()
        finally:
            server.stop(grace_s=grace_s)


@contextmanager
def _interrupted_by(*numbers: signal.Signals) -> Iterator[None]:
    """Context in which the signals raise KeyboardInterrupt on the main thread, wherever it waits."""
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _printer(role: RoleName) -> Callable[[str], None]:
    return lambda address: print(f"specray {role} worker listens on {address}", flush=True)


class EngineServerThread:
    """An engine server with its engine, on a thread of its own.

    Methods are called from any other thread and block for at most their time-outs.
    """

    def __init__(
        self,
        engine_factory: EngineFactory,
        *,
        role: RoleName,
        address: str,
        options: ChannelOptions | None = None,
        max_pending: int = 256,
    ) -> None:
        """Makes a server that runs from ``start`` on. Raises ConfigError for a wrong address."""
        self._server = engine_server(
            engine_factory, role=role, address=address, options=options, max_pending=max_pending
        )
        self._role = role
        self._loop_thread: LoopThread | None = None

    @property
    def address(self) -> str:
        """Address of the server; after ``start`` with the real port."""
        return self._server.address

    @property
    def is_alive(self) -> bool:
        """Whether the server runs and its engine is not broken; costs nothing."""
        return self._loop_thread is not None and self._loop_thread.is_alive and self._server.is_serving

    @property
    def info(self) -> EngineInfo | None:
        return self._server.info

    @property
    def num_routers(self) -> int:
        return self._server.num_routers

    @property
    def busy_share(self) -> float:
        """Share of the last seconds that the engine computed, 0..1."""
        busy = self._server.busy
        return 0.0 if busy is None else busy.share

    @property
    def call_s(self) -> float:
        """Seconds since the engine call in progress began; 0 without one."""
        busy = self._server.busy
        return 0.0 if busy is None else busy.call_s

    def start(self, *, timeout_s: float = 600.0) -> str:
        """Loads the engine and listens; returns the address, with the real port.

        Raises:
            ConfigError: the address is in use or not writable; or what the engine's factory raises.
            EngineLostError: the engine was not loaded within ``timeout_s`` seconds.
        """
        self._loop_thread = LoopThread(f"specray-{self._role}-engine")
        try:
            return self._loop_thread.run(self._server.start(), timeout_s=timeout_s)
        except BaseException as error:
            # The thread may still be loading; it ends after that.
            self._loop_thread.stop(timeout_s=0.0)
            self._loop_thread = None
            if isinstance(error, NoAnswerError):
                reason = f"the {self._role} was not loaded within {timeout_s:g} s"
                raise EngineLostError(reason) from None
            raise

    def check(self, *, timeout_s: float) -> None:
        """Runs a real engine step. Raises EngineLostError when it fails or exceeds ``timeout_s`` seconds."""
        if self._loop_thread is None:
            raise EngineLostError(f"the {self._role} server does not run")
        try:
            self._loop_thread.run(self._server.check(), timeout_s=timeout_s)
        except NoAnswerError:
            reason = f"the {self._role} engine did not end a step within {timeout_s:g} s"
            raise EngineLostError(reason) from None

    def wait_broken(self) -> EngineLostError:
        """Waits until the engine can no longer work; returns the reason."""
        while self.is_alive:
            time.sleep(0.2)
        return self._server.failure or EngineLostError(f"the {self._role} server does not run")

    def stop(self, *, grace_s: float = 5.0, drain_s: float = 0.0) -> None:
        """Answers pending requests for at most ``grace_s`` seconds, then ends; idempotent.

        A draft's routers are served for up to ``drain_s`` seconds more while they look for another draft. An
        engine that hangs in a call stays, with its thread.
        """
        thread, self._loop_thread = self._loop_thread, None
        if thread is None:
            return
        try:
            stopping = self._server.stop(grace_s, drain_s=drain_s)
            thread.run(stopping, timeout_s=drain_s + 2 * grace_s + STOP_TIMEOUT_S)
        except NoAnswerError as error:
            logger.error("%s", error)
        finally:
            thread.stop(timeout_s=STOP_TIMEOUT_S)
