"""Connection of a router to one engine, draft or target: one channel with one long stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Generic, Self

import grpc
from grpc import aio

from specray.engine_info import PROTOCOL_VERSION, EngineInfo
from specray.errors import ConfigError, EngineLostError, InvalidRequestError, OverloadedError, ProtocolError
from specray.rpc.channel import Address, ChannelOptions, open_channel, parse_peer
from specray.rpc.codec.values import decode_info, parse
from specray.rpc.pb import target_pb2
from specray.rpc.role import DRAFT, LOAD_ADAPTER, TARGET, UNLOAD_ADAPTER, EngineService, ItemT, RepliesT
from specray.rpc.security import Metadata, PeerSecurity
from specray.rpc.status import error_of
from specray.types import DraftReplies, SpeculateItem, TargetReplies, VerifyItem

BytesStream = aio.StreamStreamCall[bytes, bytes]


class GrpcConnection(Generic[ItemT, RepliesT]):
    """Sends batches of items and receives batches of replies, independently of each other.

    Replies that are not taken wait in gRPC, whose flow control holds the engine back. A reader task between
    the stream and ``replies`` would cost every round another iteration of the event loop.
    """

    role: ClassVar[EngineService[Any, Any]]

    def __init__(
        self,
        address: Address,
        channel: aio.Channel,
        stream: BytesStream,
        info: EngineInfo,
        *,
        send_timeout_s: float = 5.0,
        security: PeerSecurity | None = None,
    ) -> None:
        self._security = security or PeerSecurity()
        self._address = address
        self._channel = channel
        self._stream = stream
        self._info = info
        self._send_timeout_s = send_timeout_s
        self._loop = asyncio.get_running_loop()
        self._reason: str | None = None
        """Reason why the connection is lost."""
        self._write_lock = asyncio.Lock()
        self._write_since: float | None = None
        """Start of the write in progress, in monotonic seconds."""
        self._watchdog: asyncio.TimerHandle | None = None
        self._is_closed = False

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
        send_timeout_s: float = 5.0,
        options: ChannelOptions | None = None,
    ) -> Self:
        """Connects to the engine at ``unix:/path`` or ``host:port``; of a target, to its leader.

        Args:
            timeout_s: total seconds to connect.
            wait_for_ready: True waits for a worker that does not listen yet; False fails at once.
            send_timeout_s: seconds after which an engine that takes nothing off the stream counts as lost.

        Raises:
            ConfigError: the address is not valid, or the worker there has the other role.
            ProtocolError: the worker speaks another protocol version.
            EngineLostError: nobody answers in time.
        """
        peer, options = parse_peer(address), options or ChannelOptions()
        channel, stream, info = await _open_stream(
            cls.role, peer, timeout_s=timeout_s, wait_for_ready=wait_for_ready, options=options
        )
        return cls(peer, channel, stream, info, send_timeout_s=send_timeout_s, security=options.security)

    @property
    def info(self) -> EngineInfo:
        """Engine info from when the connection was made."""
        return self._info

    async def fetch_info(self, *, timeout_s: float = 2.0) -> EngineInfo:
        """Asks the engine for its current info. Raises EngineLostError after ``timeout_s`` seconds."""
        self._raise_if_lost()
        try:
            metadata = self._security.metadata()
            return await _get_info(
                self.role,
                self._address,
                self._channel,
                metadata,
                timeout_s=timeout_s,
                wait_for_ready=False,
            )
        except BaseException as error:
            reason = str(error) if isinstance(error, (ConfigError, ProtocolError)) else failure_of(error)
            if reason is None:
                raise
            # Closing the connection ends this call too.
            raise EngineLostError(f"{_name(self.role, self._address)}: {self._reason or reason}") from None

    @property
    def is_lost(self) -> bool:
        """Whether the connection is known to be gone or closed; every call then raises EngineLostError."""
        return self._reason is not None or self._stream.done()

    async def send(self, items: Sequence[ItemT], released: Sequence[str] = ()) -> None:
        """Sends one batch, and sequences to free before it. Cancelled half-way, it ends the connection.

        Raises:
            EngineLostError: the connection is gone, or the engine took nothing for ``send_timeout_s``.
        """
        await self._write(self.role.encode_request(items, released))

    async def release(self, request_ids: Sequence[str]) -> None:
        """Frees sequences on the engine, in order with the items. Raises EngineLostError."""
        if request_ids:
            await self._write(self.role.encode_request((), request_ids))

    async def replies(self) -> RepliesT:
        """Waits for the next batch of replies; one call at a time. Cancelled, it ends the connection.

        Raises:
            EngineLostError: the connection is gone and all replies that had arrived were taken.
        """
        self._raise_if_lost()
        try:
            data = await self._stream.read()
            if data is not aio.EOF:
                replies: RepliesT = self.role.decode_replies(_as_bytes(data))
                return replies
            self._lose("the engine ended the stream")
        except ProtocolError as error:
            self._lose(f"broke the protocol: {error}")
        except BaseException as error:
            self._lose_by(error)
        raise EngineLostError(self._describe_loss())

    async def close(self) -> None:
        """Ends the stream, which frees all its sequences on the engine; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lose("the connection was closed")
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._channel.close(None)

    async def _write(self, data: bytes) -> None:
        async with self._write_lock:
            self._raise_if_lost()
            self._watch_write()
            try:
                await self._stream.write(data)
                return
            except BaseException as error:
                self._lose_by(error)
            finally:
                self._write_since = None
        self._raise_if_lost()

    def _watch_write(self) -> None:
        # One timer for all writes, re-armed only when it fires: a time-out per write costs as much as the
        # codec.
        self._write_since = time.monotonic()
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._send_timeout_s, self._check_write)

    def _check_write(self) -> None:
        self._watchdog = None
        if self._write_since is None or self.is_lost:
            return
        remaining_s = self._write_since + self._send_timeout_s - time.monotonic()
        if remaining_s > 0:
            self._watchdog = self._loop.call_later(remaining_s, self._check_write)
        else:
            self._lose(f"took nothing for {self._send_timeout_s} s")

    def _lose(self, reason: str) -> None:
        """Marks the connection as lost; the first reason counts."""
        if self._reason is None:
            self._reason = reason
        self._stream.cancel()

    def _lose_by(self, error: BaseException) -> None:
        """Ends the stream after a failed call; re-raises ``error`` if it is not a failure of the call."""
        reason = failure_of(error)
        self._lose(reason or "the stream was cancelled")
        if reason is None:
            raise error

    def _raise_if_lost(self) -> None:
        if self._reason is not None:
            raise EngineLostError(self._describe_loss())

    def _describe_loss(self) -> str:
        return f"{_name(self.role, self._address)}: {self._reason}"


class GrpcDrafter(GrpcConnection[SpeculateItem, DraftReplies]):
    """``interfaces.Drafter`` over gRPC; made by :meth:`connect`."""

    role = DRAFT

    async def speculate(self, items: Sequence[SpeculateItem], released: Sequence[str] = ()) -> None:
        await self.send(items, released)


class GrpcVerifier(GrpcConnection[VerifyItem, TargetReplies]):
    """``interfaces.Verifier`` over gRPC; made by :meth:`connect`."""

    role = TARGET

    async def verify(self, items: Sequence[VerifyItem], released: Sequence[str] = ()) -> None:
        await self.send(items, released)

    async def load_adapter(self, folder: str, digest: bytes = b"", *, timeout_s: float = 120.0) -> bytes:
        request = target_pb2.LoadAdapterRequest(folder=folder, digest=digest)
        data = await self._call(LOAD_ADAPTER, request.SerializeToString(), timeout_s=timeout_s)
        return parse(target_pb2.LoadAdapterResponse, data).digest

    async def unload_adapter(self, digest: bytes, *, timeout_s: float = 30.0) -> None:
        request = target_pb2.UnloadAdapterRequest(digest=digest)
        await self._call(UNLOAD_ADAPTER, request.SerializeToString(), timeout_s=timeout_s)

    async def _call(self, name: str, data: bytes, *, timeout_s: float) -> bytes:
        """The answer of a call beside the stream. Raises what the engine's method raises, EngineLostError."""
        self._raise_if_lost()
        call: aio.UnaryUnaryMultiCallable[bytes, bytes]
        call = self._channel.unary_unary(f"/{self.role.service}/{name}", None, None)
        peer = _name(self.role, self._address)
        async with calling(peer, timeout_s, f"no answer to {name} within"):
            try:
                return await call(data, timeout=timeout_s, metadata=self._security.metadata())
            except aio.AioRpcError as error:
                refusal = error_of(error)
                if isinstance(refusal, (InvalidRequestError, OverloadedError)):
                    raise refusal from None
                raise


async def _open_stream(
    role: EngineService[Any, Any],
    address: Address,
    *,
    timeout_s: float,
    wait_for_ready: bool,
    options: ChannelOptions,
) -> tuple[aio.Channel, BytesStream, EngineInfo]:
    """Asks the engine for its info and opens the stream; returns once the engine has accepted it.

    Raises:
        EngineLostError: nobody answers within ``timeout_s``, or the engine refuses.
        ConfigError: the engine has another role.
        ProtocolError: the engine speaks another protocol version or answers nonsense.
    """
    peer = _name(role, address)
    try:
        channel, metadata = open_channel(address, options), options.security.metadata()
    except ConfigError as error:
        # Files are replaced one by one: the next attempt may find a matching set.
        raise EngineLostError(f"{peer}: {error}") from None
    try:
        async with calling(peer, timeout_s, "no answer within"):
            info = await _get_info(
                role, address, channel, metadata, timeout_s=timeout_s, wait_for_ready=wait_for_ready
            )
            _check_info(role, address, info)
            stream: BytesStream = channel.stream_stream(role.stream_path, None, None)(metadata=metadata)
            await stream.initial_metadata()
            if stream.done():
                reason = f"{(await stream.code()).name}: {await stream.details()}"
                raise EngineLostError(f"{peer}: {reason}")
        return channel, stream, info
    except BaseException:
        await channel.close(None)
        raise


async def _get_info(
    role: EngineService[Any, Any],
    address: Address,
    channel: aio.Channel,
    metadata: Metadata,
    *,
    timeout_s: float,
    wait_for_ready: bool,
) -> EngineInfo:
    get_info: aio.UnaryUnaryMultiCallable[bytes, bytes]
    get_info = channel.unary_unary(role.info_path, None, None)
    try:
        data = await get_info(b"", timeout=timeout_s, metadata=metadata, wait_for_ready=wait_for_ready)
    except aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise ConfigError(f"{address.target} serves no {role.service}: is it a {role.name}?") from None
        raise
    return decode_info(role.info_message, data)


def _check_info(role: EngineService[Any, Any], address: Address, info: EngineInfo) -> None:
    if info.role != role.name:
        raise ConfigError(f"the worker at {address.target} is a {info.role!r}; needed: {role.name!r}")
    if info.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the {role.name} at {address.target} speaks protocol version {info.protocol_version}; "
            f"needed: {PROTOCOL_VERSION}"
        )


def _name(role: EngineService[Any, Any], address: Address) -> str:
    return f"{role.name} at {address.target}"


@asynccontextmanager
async def calling(peer: str, timeout_s: float, late: str) -> AsyncIterator[None]:
    """Context that bounds the total time of the calls within it, and names the peer in their errors.

    Args:
        late: text before the seconds in the message of a time-out.

    Raises:
        EngineLostError: a call failed or timed out.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except BaseException as error:
        is_late = isinstance(error, TimeoutError)
        reason = f"{late} {timeout_s:g} s" if is_late else failure_of(error)
        if reason is None:
            raise
        raise EngineLostError(f"{peer}: {reason}") from None


def failure_of(error: BaseException) -> str | None:
    """Reason of a failed call, in words; None: the error is not a failure of the call.

    gRPC also raises CancelledError in a waiting task when another task cancels the call or closes its
    channel. To the waiting task that means a lost peer; only a cancellation of the task itself may end it.
    """
    match error:
        case aio.AioRpcError():
            return f"{error.code().name}: {error.details()}"
        case aio.BaseError() | asyncio.InvalidStateError():
            return f"the call has ended ({error})"
        case asyncio.CancelledError() if not _is_own_cancellation():
            return "the call was cancelled"
        case _:
            return None


def _is_own_cancellation() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _as_bytes(data: object) -> bytes:
    assert isinstance(data, bytes)
    return data
