"""Connection of a router to a target."""

from __future__ import annotations

from collections.abc import Sequence

from specray.rpc.channel import ChannelOptions, parse_peer
from specray.rpc.connections.connection import EngineConnection, open_stream
from specray.rpc.role import TARGET
from specray.types import TargetReplies, TargetReply, VerifyItem


class GrpcVerifier(EngineConnection[VerifyItem, TargetReply, TargetReplies]):
    """``interfaces.Verifier`` over gRPC; made by :meth:`connect`."""

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
        send_timeout_s: float = 5.0,
        options: ChannelOptions | None = None,
    ) -> GrpcVerifier:
        """Connects to the target's leader at ``unix:/path`` or ``host:port``.

        Args:
            timeout_s: total seconds to connect.
            wait_for_ready: True waits for a worker that does not listen yet; False fails at once.
            send_timeout_s: seconds after which a target that takes nothing off the stream counts as lost.

        Raises:
            ConfigError: the address is not valid, or the worker there is not a target.
            ProtocolError: the worker speaks another protocol version.
            EngineLostError: nobody answers in time.
        """
        peer = parse_peer(address)
        options = options or ChannelOptions()
        channel, stream, info = await open_stream(
            TARGET,
            peer,
            timeout_s=timeout_s,
            wait_for_ready=wait_for_ready,
            options=options,
        )
        return cls(
            TARGET, peer, channel, stream, info, send_timeout_s=send_timeout_s, security=options.security
        )

    async def verify(self, items: Sequence[VerifyItem], released: Sequence[str] = ()) -> None:
        """Sends one batch, which becomes one ragged forward, as ``send``."""
        await self.send(items, released)
