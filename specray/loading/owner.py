"""Loads and unloads models, one at a time, as ``table`` decides; the only one that does.

Requests are at the Ingresses, which therefore decide whether a model is used: before it leaves, each is asked
to close it, and one with a request that runs or waits refuses. So no model leaves under a request, and none
between its load and the request that it was loaded for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from specray.errors import EngineLostError, SpecrayError
from specray.loading.table import Load, ModelState, ModelTable, Unload

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between two looks at the use of models while somebody waits or a model may become idle."""


class ModelLoadError(SpecrayError):
    """A model's application did not start."""

    def __init__(self, message: str, *, is_memory: bool = False) -> None:
        super().__init__(message)
        self.is_memory = is_memory


@dataclass(frozen=True, slots=True)
class ModelUse:
    """Use of a model at one Ingress or all."""

    num_users: int
    """Requests that run or wait."""
    idle_s: float
    """Seconds since the last one ended; 0 while there is one."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What clients see of a model's state."""

    state: ModelState
    reason: str
    """Why the last load failed; empty: it did not."""
    memory_gib: float
    """GiB that it takes, or would take."""
    load_s: float | None
    """Seconds of its last load; None: there was none."""


class Applications(Protocol):
    """The models' applications."""

    async def found(self) -> Mapping[str, ModelState]:
        """States of those that are there: LOADING, LOADED or DRAINING."""

    async def load(self, name: str) -> None:
        """Starts one, or goes on waiting for it.

        Raises:
            ModelLoadError: it has not started; nothing of it is left.
        """

    async def measure(self, name: str) -> int:
        """Bytes of all processes of one that is loaded; 0: not known."""

    async def remember(self, name: str, num_bytes: int) -> None:
        """Keeps what it takes for its next loads, also by another owner."""

    async def unload(self, name: str) -> None:
        """Ends one: its requests are finished for the drain's time, and its room is free then."""


class Ingresses(Protocol):
    """All Ingresses together."""

    async def usage(self) -> Mapping[str, ModelUse]: ...

    async def close(self, name: str, *, is_forced: bool) -> bool:
        """Lets no new request to a model until it is opened by a load.

        Returns:
            False if a request uses it, or an Ingress does not answer: it is open. Forced: True.
        """


class ModelOwner:
    """Does what ``table`` decides.

    Args:
        changed: is told after each change; for metrics.
    """

    def __init__(
        self,
        table: ModelTable,
        applications: Applications,
        ingresses: Ingresses,
        *,
        changed: Callable[[str, str], None] = lambda name, result: None,
    ) -> None:
        self._table = table
        self._applications = applications
        self._ingresses = ingresses
        self._tell = changed
        self._load_s: dict[str, float] = {}
        self._waiters: Counter[str] = Counter()
        self._work = asyncio.Event()
        self._changed = asyncio.Condition()

    def statuses(self) -> dict[str, ModelStatus]:
        return {
            name: ModelStatus(
                each.state, each.reason, each.needs.memory_bytes / 2**30, self._load_s.get(name)
            )
            for name, each in self._table.models.items()
        }

    async def load(self, name: str, *, timeout_s: float) -> ModelStatus:
        """Returns once the model is loaded.

        Raises:
            EngineLostError: it cannot be loaded, or not in time; says why.
        """
        model = self._table[name]
        now = _now_s()
        if model.state is ModelState.FAILED and now < model.retry_s:
            raise self._failure(name)
        self._table.want(name, now)
        self._work.set()
        self._waiters[name] += 1
        try:
            await self._until(lambda: model.wanted_s is None, timeout_s)
        except TimeoutError:
            raise self._late(name, timeout_s) from None
        finally:
            self._waiters[name] -= 1
            if not self._waiters[name]:
                self._table.forgo(name)
        if model.state is ModelState.FAILED:
            raise self._failure(name)
        return self.statuses()[name]

    async def unload(self, name: str, *, timeout_s: float) -> ModelStatus:
        """Returns once the model is unloaded; requests under way are finished first.

        Raises:
            EngineLostError: not in time.
        """
        model = self._table[name]
        self._table.unwant(name)
        self._work.set()
        try:
            await self._until(lambda: not model.is_unwanted, timeout_s)
        except TimeoutError:
            raise EngineLostError(f"model {name!r} is not unloaded within {timeout_s:g} s") from None
        return self.statuses()[name]

    async def run(self) -> None:
        """Works until it is cancelled."""
        await self._adopt()
        while True:
            if self._is_watching():
                await self._observe()
            step = self._table.step(_now_s())
            if step is not None:
                await self._do(step)
                continue
            async with self._changed:
                self._changed.notify_all()
            await self._pause()

    async def _until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Waits for a change of the table that makes it so. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(is_so)

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S if self._is_watching() else None):
                await self._work.wait()
        self._work.clear()

    def _is_watching(self) -> bool:
        """Whether time or use may lead to a step."""
        return any(
            each.wanted_s is not None or (each.state is ModelState.LOADED and each.keep_alive_s is not None)
            for each in self._table.models.values()
        )

    async def _adopt(self) -> None:
        """Takes over the applications that are there: an earlier owner has begun them."""
        for name, state in (await self._applications.found()).items():
            if name not in self._table.models:
                continue
            self._table.adopt(name, state, _now_s())
            if state is ModelState.LOADING:
                await self._load(name)
            elif state is ModelState.DRAINING:
                await self._applications.unload(name)
                self._table.unloaded(name)

    async def _observe(self) -> None:
        now = _now_s()
        for name, use in (await self._ingresses.usage()).items():
            if name in self._table.models:
                self._table.observe(name, use.num_users, now - use.idle_s)
        if self._table.is_wanted:
            # Another may have to leave: caches have filled since the load.
            loaded = [name for name, each in self._table.models.items() if each.state is ModelState.LOADED]
            await asyncio.gather(*map(self._measure, loaded))

    async def _measure(self, name: str) -> None:
        num_bytes = await self._applications.measure(name)
        if num_bytes and self._table.measured(name, num_bytes):
            await self._applications.remember(name, num_bytes)

    async def _do(self, step: Load | Unload) -> None:
        if isinstance(step, Load):
            await self._load(step.name)
        elif await self._ingresses.close(step.name, is_forced=step.is_forced):
            logger.info("unloading %s", step.name)
            await self._applications.unload(step.name)
            self._table.unloaded(step.name)
            self._tell(step.name, "unloaded")
        else:
            self._table.busy(step.name, _now_s())
        async with self._changed:
            self._changed.notify_all()
        if isinstance(step, Load) and self._table[step.name].state is ModelState.LOADED:
            await self._measure(step.name)

    async def _load(self, name: str) -> None:
        logger.info("loading %s", name)
        began_s = _now_s()
        try:
            await self._applications.load(name)
        except ModelLoadError as error:
            logger.warning("%s is not loaded: %s", name, error)
            self._table.failed(name, str(error), _now_s(), is_memory=error.is_memory)
            self._tell(name, "failed")
            return
        now = _now_s()
        self._load_s[name] = now - began_s
        self._table.loaded(name, now)
        self._tell(name, "loaded")

    def _failure(self, name: str) -> EngineLostError:
        model = self._table[name]
        wait_s = max(0.0, model.retry_s - _now_s())
        return EngineLostError(
            f"model {name!r} could not be loaded: {model.reason}; "
            f"the next attempt is possible in {wait_s:.0f} s"
        )

    def _late(self, name: str, timeout_s: float) -> EngineLostError:
        state = self._table[name].state
        if state is ModelState.LOADING:
            return EngineLostError(f"model {name!r} still loads after {timeout_s:.3g} s")
        users = [
            each.name
            for each in self._table.models.values()
            if each.state is not ModelState.UNLOADED and each.name != name
        ]
        return EngineLostError(
            f"model {name!r} found no room within {timeout_s:.3g} s: it needs {self._table[name].needs}; "
            f"allowed for all models: {self._table.room}, of which {self._table.taken} are taken by "
            + ", ".join(users)
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
