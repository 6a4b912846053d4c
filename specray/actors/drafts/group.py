"""A running draft: rank 0 with its gRPC server in this process, and the other ranks as actors."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import ray

from specray.actors.node import listen_address, listen_host, meet_on_own_interface, memory_bytes
from specray.actors.targets.group import PlacedRanks, first_line, starting
from specray.config import Config
from specray.errors import EngineLostError
from specray.rpc.workers.worker import EngineServerThread

if TYPE_CHECKING:
    from specray.engine.group.parallel import GroupStore

logger = logging.getLogger(__name__)

GRACE_S = 1.0
MAX_CALL_S = 60.0
"""Seconds after which an engine call counts as hung; calls are bounded and should take milliseconds."""
SILENCE_S = 4.0
"""Seconds without an answer after which a rank fails a health check. Serve allows a check 5 s, and three
fails."""


class DraftGroup:
    """One draft with one rank or several; made, started and stopped on one event loop.

    A draft with several ranks is the only one in its process, because a process can be in one group only. Not
    reusable: after ``stop`` make another.

    Args:
        config: the whole configuration.
        followers: the other ranks, not placed yet; None for a draft with one rank.
    """

    def __init__(self, config: Config, followers: PlacedRanks | None = None) -> None:
        self.config = config
        self.address = ""
        self._followers = followers
        self._store: GroupStore | None = None
        self._server: EngineServerThread | None = None
        self._watch: asyncio.Task[None] | None = None
        self._lost: str | None = None
        """Reason why a rank can no longer work; None: all work."""
        self._is_silent = False
        """True if a rank did not answer the last check."""

    @property
    def server(self) -> EngineServerThread:
        """Server of this process's engine; after ``start``."""
        assert self._server is not None, "server comes after start"
        return self._server

    @property
    def can_be_leased(self) -> bool:
        """Whether a router may lease it: no failure is known."""
        is_stuck = self.server.call_s > self.config.router.round_timeout_s
        return self._lost is None and not self._is_silent and not is_stuck

    async def start(self) -> None:
        """Places the other ranks, loads every shard, and starts the server.

        Raises:
            ConfigError: the model or a setting is wrong; no other rank is left running.
            EngineLostError: a rank failed, or not all were ready in time; none is left running.
        """
        async with starting("draft", self.config.router.start_timeout_s, self._stop_followers):
            self._server, self.address = await self._start()
        if self._followers is not None:
            self._watch = asyncio.create_task(self._watch_followers(self._followers))

    async def check(self) -> None:
        """Checks cheaply that the engine makes progress and every other rank answers.

        Raises:
            EngineLostError: it does not, or a rank is gone.
        """
        if self._lost is not None:
            raise EngineLostError(self._lost)
        if not self.server.is_alive:
            raise EngineLostError("the draft's engine is broken")
        if self.server.call_s > MAX_CALL_S:
            raise EngineLostError(f"the draft's engine has not ended a call for {MAX_CALL_S:g} s")
        if self._followers is None:
            return
        try:
            async with asyncio.timeout(SILENCE_S):
                await self._followers.processes()
        except TimeoutError:
            self._is_silent = True
            raise EngineLostError(f"a rank of the draft has been silent for {SILENCE_S:g} s") from None
        except ray.exceptions.RayError as error:
            raise EngineLostError(f"a rank of the draft is gone: {first_line(error)}") from None
        self._is_silent = False

    async def memory_bytes(self) -> int:
        """Bytes of all ranks. Raises ray.exceptions.RayError: one is gone."""
        others = 0 if self._followers is None else await self._followers.memory_bytes()
        return memory_bytes() + others

    async def stop(self, *, drain_s: float) -> None:
        """Ends the server, which serves its routers for up to ``drain_s`` seconds, and then all ranks."""
        if self._watch is not None:
            self._watch.cancel()
        if self._lost is not None or self._is_silent:
            # The engine may wait for the ranks, and its routers for the engine.
            self._stop_followers()
            drain_s = 0.0
        if self._server is not None:
            await asyncio.to_thread(self._server.stop, grace_s=GRACE_S, drain_s=drain_s)
        if self._followers is not None:
            await self._followers.end()

    async def _start(self) -> tuple[EngineServerThread, str]:
        from specray.actors.workers import start_draft
        from specray.engine.group.parallel import GroupStore

        config, followers = self.config, self._followers
        address = listen_address(config, "draft")
        if followers is None:
            return await asyncio.to_thread(start_draft, config, address=address)
        await followers.place(config.draft.tensor_parallel_size - 1, first_rank=1)
        meet_on_own_interface(config)
        store = self._store = GroupStore(listen_host(config), timeout_s=config.router.start_timeout_s)
        started, _ = await asyncio.gather(
            asyncio.to_thread(start_draft, config, address=address, meeting=store, place=followers.own_place),
            followers.start(store.address),
        )
        return started

    async def _watch_followers(self, followers: PlacedRanks) -> None:
        self._lost = await followers.ended()
        logger.error("%s", self._lost)
        # Ranks are useless without each other; an engine that waits for them sees that they are gone.
        followers.stop()

    def _stop_followers(self) -> None:
        if self._followers is not None:
            self._followers.stop()
