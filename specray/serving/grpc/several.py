"""The public gRPC service in front of several models: each call goes to the handler of the model it names."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from specray import __version__
from specray.engine_info import PROTOCOL_VERSION
from specray.errors import SpecrayError
from specray.loading.table import ModelState
from specray.requests import ServedModel, ServiceInfo
from specray.rpc.inference.types import Admitter, GenerateEvent, GenerateParams
from specray.rpc.status import status_of
from specray.serving.admission.api_keys import Caller, Keyring
from specray.serving.admission.capacity import Admission
from specray.serving.admission.places import Place
from specray.serving.generation import close
from specray.serving.grpc.handler import admitter
from specray.serving.models.catalog import ModelCatalog
from specray.serving.observe import CallObserver


class SeveralGrpcIngress:
    """rpc.inference.InferenceHandler in front of several models.

    Args:
        max_bytes: of the longest message.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        admission: Admission,
        observer: CallObserver,
        *,
        max_bytes: int,
    ) -> None:
        self._catalog = catalog
        self._admission = admission
        self._observer = observer
        self._max_bytes = max_bytes
        self._place: Place | None = None

    def admitter(self, keyring: Keyring) -> Admitter:
        return admitter(self, keyring, self._admission, lambda: self._max_bytes)

    def at(self, place: Place) -> SeveralGrpcIngress:
        """The handler of the call that has this place."""
        handler = SeveralGrpcIngress(
            self._catalog, self._admission, self._observer, max_bytes=self._max_bytes
        )
        handler._place = place
        return handler

    async def generate(self, params: GenerateParams) -> AsyncGenerator[GenerateEvent, None]:
        """See rpc.inference.InferenceHandler."""
        if self._place is None:
            with self._admission.places.arrive(Caller()) as place:
                events = self.at(place).generate(params)
                try:
                    async for event in events:
                        yield event
                finally:
                    await events.aclose()
            return
        try:
            answers = await self._catalog.enter(params.model, self._place)
        except SpecrayError as error:
            self.refused("Generate", error)
            raise
        handler = answers.grpc.at(self._place)
        answered = handler.generate(replace(params, model=answers.model.name))
        try:
            async for event in answered:
                yield event
        finally:
            await close(answered)

    async def info(self) -> ServiceInfo:
        """See rpc.inference.InferenceHandler: all models, and the default or the first that is loaded."""
        statuses = await self._catalog.owner.statuses()
        models = tuple(
            ServedModel(name, model.aliases, statuses[name].state.value)
            for name, model in self._catalog.models.items()
        )
        loaded = [each.name for each in models if each.state == ModelState.LOADED]
        if not loaded:
            return ServiceInfo("", None, 0, 0, PROTOCOL_VERSION, __version__, models=models)
        default = self._catalog.find(None).name if self._catalog.default else ""
        name = default if default in loaded else loaded[0]
        info = await (await self._catalog.answers(name)).grpc.info()
        return replace(info, models=models)

    def refused(self, method: str, error: Exception) -> None:
        """See rpc.inference_types.Refused."""
        record = self._observer.begin("grpc", method)
        record.failed(error)
        self._observer.end(record, status_of(error, logs=False).code.name)
