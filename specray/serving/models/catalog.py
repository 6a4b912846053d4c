"""The models of a service by the names that requests use, at one Ingress: whom a call reaches, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp

from specray.config import Config, ModelConfig
from specray.errors import InvalidRequestError, ModelNotFoundError, shown
from specray.loading.owner import ModelStatus
from specray.loading.uses import ModelUses
from specray.rpc.inference.types import InferenceHandler
from specray.serving.admission.capacity import Admission
from specray.serving.admission.places import Place
from specray.serving.calls.limits import ServiceLimits


class Owner(Protocol):
    """The owner of the models, as an Ingress calls it."""

    async def load(self, name: str, timeout_s: float) -> ModelStatus:
        """See ``ModelOwner.load``. Raises EngineLostError."""
        ...

    async def unload(self, name: str, timeout_s: float) -> ModelStatus:
        """See ``ModelOwner.unload``. Raises EngineLostError."""
        ...

    async def statuses(self) -> Mapping[str, ModelStatus]:
        """Raises EngineLostError: the owner does not answer."""
        ...


class PlacedHandler(InferenceHandler, Protocol):
    """A handler whose calls have places."""

    def at(self, place: Place) -> InferenceHandler:
        """The handler of the call that has this place."""
        ...


@dataclass(frozen=True, slots=True)
class ModelAnswers:
    """What answers the calls of one model at one Ingress, as if it were served alone."""

    model: ModelConfig
    app: ASGIApp
    """The application of its HTTP calls, which have passed the edge."""
    grpc: PlacedHandler
    admission: Admission
    limits: ServiceLimits


class ModelCatalog:
    """All models of a service.

    Args:
        make: makes what answers the calls of a model, at its first use.
        owner: loads and unloads.
    """

    def __init__(
        self, config: Config, owner: Owner, make: Callable[[ModelConfig], Awaitable[ModelAnswers]]
    ) -> None:
        self.owner = owner
        self.models = {each.name: each for each in config.models}
        self._by_name = {name: each for each in config.models for name in each.names}
        self.default = config.default_model
        if self.default is None and len(config.models) == 1:
            self.default = config.models[0].name
        self._max_wait_s = config.loading.max_wait_s
        self.uses = ModelUses(self.models, owner.load, max_waiting=config.loading.max_waiting)
        self._make = make
        self.made: dict[str, ModelAnswers] = {}
        """What answers the calls of those models that were used here."""
        self._turns = {name: asyncio.Lock() for name in self.models}

    def find(self, asked: str | None) -> ModelConfig:
        """The model of a name, an alias or an adapter's ``model:adapter``.

        Raises:
            ModelNotFoundError: there is none; the message has the names.
            InvalidRequestError: none is named, and there is no default.
        """
        name = asked or self.default
        if name is None:
            raise InvalidRequestError(f"model is missing; allowed: {', '.join(self._by_name)}", field="model")
        found = self._by_name.get(name) or self._by_name.get(name.partition(":")[0])
        if found is None:
            raise ModelNotFoundError(
                f"model {shown(name)} is not served here; allowed: {', '.join(self._by_name)}", field="model"
            )
        return found

    async def enter(self, asked: str | None, place: Place) -> ModelAnswers:
        """Lets a call reach its model, once that is loaded.

        Raises:
            InvalidRequestError, ModelNotFoundError: see ``find``.
            NotAllowedError: the caller's key may not ask for it.
            OverloadedError: the caller's key has too much of it in hand.
            EngineLostError: it cannot be loaded, or not in time.
        """
        model = self.find(asked)
        place.caller.check_model(model.name)
        place.to_model(model.name)
        await self.uses.enter(model.name, min(self._max_wait_s, place.remaining_s))
        place.at_end(lambda: self.uses.leave(model.name))
        return await self.answers(model.name)

    async def answers(self, name: str) -> ModelAnswers:
        """What answers the calls of a model, made now if need be."""
        async with self._turns[name]:
            if name not in self.made:
                self.made[name] = await self._make(self.models[name])
        return self.made[name]
