"""Counts the requests to each model at one Ingress, and lets them wait for its load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from specray.errors import EngineLostError
from specray.loading.owner import ModelUse


@dataclass(slots=True)
class _Model:
    is_open: bool = False
    num_users: int = 0
    """Requests from their arrival to their end, those that wait for the load among them."""
    ended_s: float = 0.0


class ModelUses:
    """Use of models at one Ingress, as ``owner.Ingresses`` asks for it.

    Args:
        names: of all models.
        load: asks the owner to load a model within a number of seconds; returns once it is loaded, and raises
            EngineLostError.
        max_waiting: requests that may wait for loads at a time.
    """

    def __init__(
        self, names: Iterable[str], load: Callable[[str, float], Awaitable[object]], *, max_waiting: int
    ) -> None:
        self._models = {name: _Model() for name in names}
        self._load = load
        self._max_waiting = max_waiting
        self._num_waiting = 0

    async def enter(self, name: str, timeout_s: float) -> None:
        """Returns once the model is loaded; it stays until as many have left as have entered.

        Raises:
            EngineLostError: it cannot be loaded, or not in time, or too many wait already; nothing entered.
        """
        model = self._models[name]
        model.num_users += 1
        try:
            if not model.is_open:
                await self._loaded(name, model, timeout_s)
        except BaseException:
            self.leave(name)
            raise

    def leave(self, name: str) -> None:
        model = self._models[name]
        model.num_users -= 1
        model.ended_s = _now_s()

    async def _loaded(self, name: str, model: _Model, timeout_s: float) -> None:
        if self._num_waiting >= self._max_waiting:
            raise EngineLostError(
                f"model {name!r} is not loaded, and {self._num_waiting} requests wait for loads; "
                f"allowed: {self._max_waiting}"
            )
        self._num_waiting += 1
        try:
            await self._load(name, timeout_s)
        finally:
            self._num_waiting -= 1
        model.is_open = True

    def usage(self) -> dict[str, ModelUse]:
        now = _now_s()
        return {
            name: ModelUse(each.num_users, 0.0 if each.num_users else now - each.ended_s)
            for name, each in self._models.items()
        }

    def close(self, name: str, *, is_forced: bool) -> bool:
        """Lets no request to the model until a load; False where one has it, unless that is forced."""
        model = self._models[name]
        if model.num_users and not is_forced:
            return False
        model.is_open = False
        return True


def _now_s() -> float:
    return asyncio.get_running_loop().time()
