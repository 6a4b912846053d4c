"""gRPC server of one engine: many routers' streams and the engine on one thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Generic, cast

import grpc
from grpc import aio

from specray.engine_info import EngineInfo
from specray.errors import ConfigError, EngineLostError, SpecrayError
from specray.interfaces import SyncDraftEngine, SyncTargetEngine
from specray.rpc.channel import ChannelOptions, bind, check_can_listen, parse_address
from specray.rpc.codec.values import encode_info
from specray.rpc.health import Health
from specray.rpc.role import (
    DRAFT,
    TARGET,
    BoundEngine,
    EngineService,
    ItemT,
    RepliesT,
    RoleName,
    bind_draft,
    bind_target,
)
from specray.rpc.status import status_of
from specray.rpc.workers.busy import BusyMeter
from specray.rpc.workers.engine_host import EngineHost
from specray.rpc.workers.router_stream import Ending, RouterStream
from specray.rpc.workers.run_ahead import RunAhead

logger = logging.getLogger(__name__)

EngineFactory = Callable[[], SyncDraftEngine] | Callable[[], SyncTargetEngine]
STOPPING = Ending(grpc.StatusCode.UNAVAILABLE, "the worker is stopping", drains=True)


class EngineServer(Generic[ItemT, RepliesT]):
    """Serves one engine to many routers; made by :func:`engine_server`.

    The engine runs on the loop's thread, which should do nothing else: see ``worker.EngineServerThread``. A
    draft merges waiting items of all streams, in turn, into one engine call up to its token budget; a target
    makes each request one call, in order of arrival. A stream that ends frees its sequences. When the engine
    breaks, streams end with INTERNAL and health becomes NOT_SERVING.
    """

    def __init__(
        self,
        role: EngineService[ItemT, RepliesT],
        make_engine: Callable[[], BoundEngine[ItemT, RepliesT]],
        address: str,
        *,
        options: ChannelOptions | None = None,
        max_pending: int = 256,
    ) -> None:
        """Makes a server that does not listen yet.

        Args:
            max_pending: maximum unanswered requests per stream; more are not read.

        Raises:
            ConfigError: the address is not valid.
        """
        self._role = role
        self._make_engine = make_engine
        self._address = parse_address(address)
        self._options = options or ChannelOptions()
        self._max_pending = max_pending
        self._health = Health(role.service)
        self._streams: set[RouterStream[ItemT, RepliesT]] = set()
        self._refusal: Ending | None = None
        self._host: EngineHost[ItemT, RepliesT] | None = None
        self._server: aio.Server | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.failure: EngineLostError | None = None
        """Reason why the engine is broken."""

    @property
    def address(self) -> str:
        """Address of the server; after ``start`` with the real port."""
        return self._address.target

    @property
    def is_serving(self) -> bool:
        return self._health.is_serving

    @property
    def num_routers(self) -> int:
        return len(self._streams)

    @property
    def info(self) -> EngineInfo | None:
        """Current info of the engine and server; None before the engine is loaded and after ``stop``."""
        return None if self._host is None else replace(self._host.info(), num_routers=self.num_routers)

    @property
    def busy(self) -> BusyMeter | None:
        """Busy meter of the engine's calls; None before the engine is loaded and after ``stop``."""
        return None if self._host is None else self._host.busy

    async def start(self) -> str:
        """Loads the engine, then listens. Returns the address.

        Raises:
            ConfigError: the address cannot be listened on, the engine has the other role, or a certificate or
                secret is missing or invalid.
            Exception: what the engine's factory raises.
        """
        check_can_listen(self._address, reuse_port=self._options.reuse_port)
        self._options.security.check()
        if self._options.security.is_open and not self._address.is_local:
            logger.warning("%s serves whoever reaches it: set rpc.tls", self._address.target)
        self._host = EngineHost(self._role, self._make_engine, on_broken=self._on_broken)
        try:
            info = self._host.start()
            if info.role != self._role.name:
                raise ConfigError(f"the engine is a {info.role!r}; needed: {self._role.name!r}")
            server = aio.server(
                options=self._options.for_server(), compression=grpc.Compression.NoCompression
            )
            await self._health.attach(server)
            server.add_generic_rpc_handlers((self._handlers(),))
            self._address = bind(server, self._address, self._options)
            self._server = server
            await server.start()
        except BaseException:
            await self.stop(0.0)
            raise
        await self._health.set_serving(True)
        return self.address

    async def stop(self, grace_s: float = 5.0, *, drain_s: float = 0.0) -> None:
        """Sets NOT_SERVING, answers pending requests for at most ``grace_s`` seconds, then ends; idempotent.

        Routers get UNAVAILABLE, that is EngineLostError, and move their sessions. A draft's routers are
        notified first, and served for at most ``drain_s`` seconds while they look for another draft.
        """
        server, self._server = self._server, None
        if server is not None:
            await self._health.stop()
            self._refusal = self._refusal or STOPPING
            await self._drain(drain_s)
            self._refuse(STOPPING)
            await server.stop(grace_s)
        host, self._host = self._host, None
        if host is not None:
            host.stop()

    async def _drain(self, drain_s: float) -> None:
        notice = self._role.drain_notice
        if notice is None or drain_s <= 0:
            return
        for stream in self._streams:
            stream.deliver(notice, 0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self._streams:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    async def check(self) -> None:
        """Runs a real engine step. Raises EngineLostError when the engine is broken or does not run."""
        if self._host is None:
            raise EngineLostError(f"the {self._role.name} server does not run")
        await self._host.check()

    def _handlers(self) -> grpc.GenericRpcHandler:
        # No (de)serialisers: messages stay bytes, so that this code answers broken ones.
        return grpc.method_handlers_generic_handler(
            self._role.service,
            {
                self._role.stream_method: grpc.stream_stream_rpc_method_handler(self._serve_stream),
                self._role.info_method: grpc.unary_unary_rpc_method_handler(self._serve_info),
                **{
                    name: grpc.unary_unary_rpc_method_handler(partial(self._serve_call, name))
                    for name in self._role.calls
                },
            },
        )

    async def _serve_info(self, _: bytes, context: aio.ServicerContext[Any, Any]) -> bytes:
        await self._options.security.admit(context)
        info = self.info
        if info is None:
            await context.abort(STOPPING.code, STOPPING.details)
        return encode_info(self._role.info_message, info)

    async def _serve_call(self, name: str, data: bytes, context: aio.ServicerContext[Any, Any]) -> bytes:
        await self._options.security.admit(context)
        try:
            if self._host is None:
                raise EngineLostError(STOPPING.details)
            return await self._host.call(name, data)
        except SpecrayError as error:
            status = status_of(error)
            await context.abort(status.code, status.details, status.metadata)

    async def _serve_stream(self, _: object, context: aio.ServicerContext[Any, Any]) -> None:
        await self._options.security.admit(context)
        if self._refusal is not None or self._host is None:
            refusal = self._refusal or STOPPING
            await context.abort(refusal.code, refusal.details)
        host = self._host
        stream = RouterStream(self._role, context, max_pending=self._max_pending)
        # Registered before any await, so that an ending that comes meanwhile finds it.
        self._streams.add(stream)
        try:
            await context.send_initial_metadata(())
            ending = await stream.serve(lambda batch: host.submit(stream, batch))
        finally:
            self._streams.discard(stream)
            host.end_stream(stream)
        if ending.code is not grpc.StatusCode.OK:
            await context.abort(ending.code, ending.details)

    def _refuse(self, ending: Ending) -> None:
        self._refusal = self._refusal or ending
        for stream in self._streams:
            stream.end(ending)

    def _on_broken(self, error: EngineLostError) -> None:
        self.failure = error
        self._refuse(Ending(grpc.StatusCode.INTERNAL, str(error)))
        task = asyncio.create_task(self._health.set_serving(False))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def engine_server(
    engine_factory: EngineFactory,
    *,
    role: RoleName,
    address: str,
    options: ChannelOptions | None = None,
    max_pending: int = 256,
) -> EngineServer[Any, Any]:
    """Makes the server of an engine, which the factory builds on the loop's thread. Raises ConfigError."""
    if role == "draft":
        make_draft = cast(Callable[[], SyncDraftEngine], engine_factory)
        return EngineServer(
            DRAFT, lambda: bind_draft(make_draft()), address, options=options, max_pending=max_pending
        )
    make_target = cast(Callable[[], SyncTargetEngine], engine_factory)
    return EngineServer(
        TARGET,
        lambda: RunAhead(bind_target(make_target())).bound(),
        address,
        options=options,
        max_pending=max_pending,
    )
