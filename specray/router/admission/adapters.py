"""Which requests may run by their adapter, and the loads that the others wait for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

from specray.errors import EngineLostError, InvalidRequestError, OverloadedError
from specray.interfaces import AdapterLoader, Clock
from specray.requests import AdapterRef, GenerateRequest
from specray.router.transport.clock import within
from specray.router.transport.links import TargetLink, current_info
from specray.telemetry.metrics import RouterMetrics

T = TypeVar("T")
logger = logging.getLogger(__name__)

ROOM_RETRY_S = 0.05
"""Seconds after which a load is tried again that found no room."""
LOAD_TIMEOUT_S = 60.0
"""Seconds for which a load that somebody commands may wait for room."""


class AdapterRoom:
    """The target's adapters, as far as the router knows, and the requests that wait for one.

    Loads go one after the other, that of the longest wait first. The least recently used adapter gives its
    place. Where all are in use, the one that was loaded first lets nobody in any more: when those who use it
    have ended, another has its place. So every adapter has its turn, however many requests others have.

    Args:
        running, waiting, held: digests of the adapters of requests that run or were put back, of those that
            wait for one, and of all.
        pinned: folders of adapters that never give their place.
        wake: called when requests that wait may be let in, or refused.
    """

    def __init__(
        self,
        clock: Clock,
        metrics: RouterMetrics,
        *,
        running: Callable[[], Collection[bytes]],
        waiting: Callable[[], Collection[bytes]],
        held: Callable[[], Collection[bytes]],
        pinned: Collection[str] = (),
        wake: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._running = running
        self._waiting = waiting
        self._held = held
        self._pinned_folders = frozenset(pinned)
        self._wake = wake
        self._link: TargetLink | None = None
        self._loaded: dict[bytes, str] = {}
        """Folders by digest, in the order of their loads."""
        self._used_s: dict[bytes, float] = {}
        """Time at which each was last of use."""
        self._names: dict[bytes, str] = {}
        """Names of those that requests have used."""
        self._pinned: set[bytes] = set()
        self._leaving: set[bytes] = set()
        """Adapters that go once no request has them: their files may have other bytes by now."""
        self._closed: bytes | None = None
        """The adapter that lets nobody in, since another needs its place."""
        self._wanted: dict[bytes, AdapterRef] = {}
        """Adapters to load, the longest wanted first."""
        self._refused: dict[bytes, InvalidRequestError] = {}
        """Adapters that cannot be loaded, until those who wait for them were told."""
        self._has_changed = False
        self._work: asyncio.Task[None] | None = None

    # For the queue

    def lets_in(self, request: GenerateRequest, *, is_begun: bool) -> bool:
        """Whether the request may run now; if not, its adapter will be loaded, or give its place.

        Args:
            is_begun: it ran before, and its adapter gives its place only after its end.

        Raises:
            InvalidRequestError: the adapter cannot be loaded.
        """
        ref = request.adapter
        if ref is None:
            return True
        if (error := self._refused.get(ref.digest)) is not None:
            raise InvalidRequestError(str(error), field=error.field)
        if ref.digest in self._loaded:
            if self._names.get(ref.digest) != ref.name:
                self._name({**self._names, ref.digest: ref.name})
            self._used_s[ref.digest] = self._clock.monotonic()
            return is_begun or ref.digest != self._closed
        self._wanted.setdefault(ref.digest, ref)
        self._begin()
        return False

    def take_change(self) -> bool:
        """Whether those who wait are to be looked at again; asked once for each change."""
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def end_look(self) -> None:
        """All who waited when something changed have been looked at."""
        self._refused.clear()

    def on_end(self, digest: bytes) -> None:
        """A request with this adapter has ended."""
        if digest in self._leaving:
            self._begin()

    def forget(self, digest: bytes) -> None:
        """The target says that it does not have it."""
        self._loaded.pop(digest, None)

    # Life

    def connect(self, link: TargetLink) -> None:
        """Goes on with a target, the first one or the next after a loss."""
        self._link = link
        self._pinned = set()
        self._leaving.intersection_update(link.info.adapters)
        self._show(dict(zip(link.info.adapters, link.info.adapter_names, strict=True)))
        self._begin()

    def lose(self) -> None:
        """The target was lost, and its adapters with it."""
        self._link = None
        self._show({})

    async def stop(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    # Commands

    async def load(self, folder: str, digest: bytes = b"", *, is_pinned: bool = False) -> bytes:
        """Loads an adapter, and returns its digest.

        Raises:
            InvalidRequestError: it can never be loaded, or the target knows no adapters.
            OverloadedError: there was no room for it within LOAD_TIMEOUT_S.
            EngineLostError: the target is lost.
        """
        end_s = self._clock.monotonic() + LOAD_TIMEOUT_S
        try:
            while True:
                try:
                    return await self._load(folder, digest, is_pinned=is_pinned)
                except OverloadedError:
                    if self._clock.monotonic() > end_s:
                        raise
                    self._close_oldest()
                    await self._clock.sleep(ROOM_RETRY_S)
        finally:
            # Also when who commanded it has gone.
            self._reopen()

    async def unload(self, digest: bytes) -> None:
        """Lets an adapter leave memory once no request has it. Raises as ``load``."""
        self._require_loader()
        self._pinned.discard(digest)
        self._leaving.add(digest)
        await self._unload_idle()

    # Work

    def _begin(self) -> None:
        has_work = self._wanted or self._leaving
        if has_work and self._link is not None and (self._work is None or self._work.done()):
            self._work = asyncio.create_task(self._load_wanted())

    async def _load_wanted(self) -> None:
        try:
            await self._unload_idle()
        except (InvalidRequestError, EngineLostError) as error:
            logger.warning("an adapter was not unloaded: %s", error)
        while self._wanted and self._link is not None:
            digest, ref = next(iter(self._wanted.items()))
            if digest not in self._waiting():
                del self._wanted[digest]
                self._reopen()
                continue
            try:
                await self._load(ref.folder, digest, is_pinned=ref.is_pinned)
            except OverloadedError:
                self._close_oldest()
                await self._clock.sleep(ROOM_RETRY_S)
                continue
            except InvalidRequestError as error:
                self._refused[digest] = InvalidRequestError(
                    f"adapter {ref.name!r} cannot be loaded: {error}", field=error.field
                )
                self._change()
            except EngineLostError as error:
                # Its link is lost, too; the next one's begins anew.
                logger.warning("adapter %s was not loaded: %s", ref.name, error)
                await self._clock.sleep(ROOM_RETRY_S)
                continue
            self._wanted.pop(digest, None)

    async def _unload_idle(self) -> None:
        """Unloads the adapters that are to go and that no request has."""
        link, loader = self._require_loader()
        for digest in self._leaving.difference(self._held()):
            self._leaving.discard(digest)
            await self._in_time(loader.unload_adapter(digest))
            await self._look(link)

    async def _load(self, folder: str, digest: bytes, *, is_pinned: bool) -> bytes:
        link, loader = self._require_loader()
        result = "lost"
        try:
            if digest not in self._loaded:
                await self._make_room(link, loader)
            digest = await self._in_time(loader.load_adapter(folder, digest))
            result = "loaded"
        except OverloadedError:
            result = "no_room"
            raise
        except InvalidRequestError:
            result = "refused"
            raise
        finally:
            # Where there is no room it is tried again and again: it counts once.
            if result != "no_room" or self._closed is None:
                self._metrics.adapters.loads.labels(result).inc()
            if result in ("refused", "lost"):
                # It needs no place.
                self._reopen()
        if is_pinned:
            self._pinned.add(digest)
        self._leaving.discard(digest)
        self._used_s[digest] = self._clock.monotonic()
        await self._look(link)
        self._reopen()
        return digest

    async def _in_time(self, call: Coroutine[Any, Any, T]) -> T:
        """Raises EngineLostError after LOAD_TIMEOUT_S."""
        try:
            return await within(self._clock, LOAD_TIMEOUT_S, call)
        except TimeoutError:
            raise EngineLostError(f"the target has not answered within {LOAD_TIMEOUT_S:g} s") from None

    async def _make_room(self, link: TargetLink, loader: AdapterLoader) -> None:
        """Lets the least recently used adapter go, if all places are taken. Raises OverloadedError."""
        most = link.info.max_adapters
        if len(self._loaded) < most:
            return
        running = {*self._running()}
        kept = running | ({*self._waiting()} - {self._closed})
        idle = [digest for digest in self._movable() if digest not in kept]
        if not idle:
            raise OverloadedError(f"{most} adapters are loaded, all in use or pinned; allowed: {most}")
        oldest = min(idle, key=lambda digest: self._used_s.get(digest, 0.0))
        await self._in_time(loader.unload_adapter(oldest))
        self._loaded.pop(oldest, None)

    async def _look(self, link: TargetLink) -> None:
        """Learns from the target which adapters it has now: for one that came, another may have left."""
        info = await current_info(link, self._clock)
        if info is None or link is not self._link:
            return
        found = dict(zip(info.adapters, info.adapter_names, strict=True))
        kept = {digest: folder for digest, folder in self._loaded.items() if digest in found}
        self._show({**kept, **found})

    def _close_oldest(self) -> None:
        if self._closed is None:
            # Not one that came just now, whose requests have yet to be let in.
            running = self._running()
            self._closed = next((digest for digest in self._movable() if digest in running), None)

    def _movable(self) -> list[bytes]:
        """Adapters that are not pinned, in the order of their loads."""
        return [
            digest
            for digest, folder in self._loaded.items()
            if digest in self._leaving or not (digest in self._pinned or folder in self._pinned_folders)
        ]

    def _reopen(self) -> None:
        self._closed = None
        self._change()

    def _show(self, loaded: dict[bytes, str]) -> None:
        self._loaded = loaded
        self._used_s = {digest: self._used_s.get(digest, 0.0) for digest in loaded}
        if self._closed not in loaded:
            self._closed = None
        self._metrics.adapters.loaded.set(len(loaded))
        self._name({digest: name for digest, name in self._names.items() if digest in loaded})
        self._change()

    def _name(self, names: dict[bytes, str]) -> None:
        self._names = names
        self._metrics.adapters.keep(names.values())

    def _change(self) -> None:
        self._has_changed = True
        self._wake()

    def _require_loader(self) -> tuple[TargetLink, AdapterLoader]:
        if self._link is None:
            raise EngineLostError("the target was lost and is being started anew")
        if self._link.info.max_adapters == 0 or self._link.loader is None:
            raise InvalidRequestError("this target knows no adapters; set target.adapters", field="adapter")
        return self._link, self._link.loader
