"""All Routers of several models as one, for what is asked about a whole service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NoReturn

from specray.errors import EngineLostError
from specray.interfaces import RouterClient
from specray.loading.table import ModelState
from specray.requests import GenerateRequest, OutputChunk, ServiceInfo
from specray.serving.models.catalog import ModelCatalog
from specray.serving.readiness import check_ready


class SeveralRouters:
    """interfaces.RouterClient for health, metrics and traces; requests go to the Router of their model."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self._catalog = catalog

    async def check(self, asked: str | None) -> None:
        """Raises EngineLostError unless the model, or each that is required, is loaded and runs steps."""
        models = self._catalog.models.values()
        wanted = [each.name for each in models if each.is_required]
        if asked is not None:
            wanted = [self._catalog.find(asked).name]
        statuses = await self._catalog.owner.statuses()
        for name in wanted:
            status = statuses[name]
            if status.state is not ModelState.LOADED:
                reason = f": {status.reason}" if status.reason else ""
                raise EngineLostError(f"model {name!r} is {status.state.value}{reason}")
        answers = [await self._catalog.answers(name) for name in wanted]
        await asyncio.gather(*(check_ready(each.admission.routers) for each in answers))

    async def check_ready(self) -> None:
        await self.check(None)

    async def service_info(self) -> ServiceInfo:
        """What any Router says. Raises EngineLostError: of those that were used here, none answers."""
        error: EngineLostError | None = None
        for routers in self._used():
            try:
                return await routers.service_info()
            except EngineLostError as lost:
                error = lost
        if error is not None:
            raise error
        return ServiceInfo("", None, 0, 0, 0, "")

    async def trace_text(self) -> str | None:
        texts = await asyncio.gather(*(routers.trace_text() for routers in self._used()))
        found = [text for text in texts if text is not None]
        return "".join(found) if found else None

    async def metrics_text(self) -> str:
        self._refuse()

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        self._refuse()

    def stream(self, request: GenerateRequest) -> AsyncIterator[OutputChunk]:
        self._refuse()

    def _used(self) -> list[RouterClient]:
        return [each.admission.routers for each in self._catalog.made.values()]

    def _refuse(self) -> NoReturn:
        raise AssertionError("a request goes to the Router of its model")
