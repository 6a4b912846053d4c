"""Connection of a router to a draft."""

from __future__ import annotations

from collections.abc import Sequence

from specray.rpc.channel import ChannelOptions, parse_peer
from specray.rpc.connections.connection import EngineConnection, open_stream
from specray.rpc.role import DRAFT
from specray.types import DraftReplies, DraftReply, SpeculateItem


class GrpcDrafter(EngineConnection[SpeculateItem, DraftReply, DraftReplies]):
    """``interfaces.Drafter`` over gRPC; made by :meth:`connect`."""

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
        send_timeout_s: float = 5.0,
        options: ChannelOptions | None = None,
    ) -> GrpcDrafter:
        """Connects to the draft at ``unix:/path`` or ``host:port``.

        Args:
            timeout_s: total seconds to connect.
            wait_for_ready: True waits for a worker that does not listen yet; False fails at once.
            send_timeout_s: seconds after which a draft that takes nothing off the stream counts as lost.

        Raises:
            ConfigError: the address is not valid, or the worker there is not a draft.
            ProtocolError: the worker speaks another protocol version.
            EngineLostError: nobody answers in time.
        """
        peer = parse_peer(address)
        options = options or ChannelOptions()
        channel, stream, info = await open_stream(
            DRAFT,
            peer,
            timeout_s=timeout_s,
            wait_for_ready=wait_for_ready,
            options=options,
        )
        return cls(
            DRAFT, peer, channel, stream, info, send_timeout_s=send_timeout_s, security=options.security
        )

    async def speculate(self, items: Sequence[SpeculateItem], released: Sequence[str] = ()) -> None:
        """Sends one batch, as ``send``."""
        await self.send(items, released)
