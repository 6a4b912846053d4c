"""What stands behind the endpoints of an Ingress: the Routers of one pair, or of several models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from specray.actors.answers import raise_if_error
from specray.actors.client import SERVE_ERRORS, ServeRouterClient
from specray.actors.live import AdapterNames
from specray.actors.mailbox import Mailbox
from specray.actors.models.applications import app_of
from specray.actors.routing import routes_by_prefix
from specray.actors.telemetry import AllMetrics, Deployment
from specray.config import Config, ModelConfig
from specray.config.live import LiveConfig, split
from specray.config.models import slug
from specray.errors import EngineLostError
from specray.grammar import PreparedCompiler
from specray.loading.owner import ModelStatus
from specray.loading.table import ModelState
from specray.routing import shared_choice
from specray.rpc.inference.types import Admitter, InferenceHandler
from specray.serving.admission.api_keys import Keyring
from specray.serving.admission.capacity import Admission
from specray.serving.grpc.handler import GrpcIngress
from specray.serving.grpc.several import SeveralGrpcIngress
from specray.serving.http.app import add_call_routes, build_http_app
from specray.serving.http.several import build_several_app
from specray.serving.http.shell import Lifespan, new_app
from specray.serving.models.catalog import ModelAnswers, ModelCatalog
from specray.serving.models.routers import SeveralRouters
from specray.serving.observe import CallObserver
from specray.serving.warmup import warm_up
from specray.tokenization import Tokenizer, load_tokenizer

OWNER_GRACE_S = 10.0
"""Seconds by which a call to the owner of models outlives its own time limit, so that its message arrives."""
STATUS_S = 2.0
"""Seconds for the owner of models to say their states."""
STALE_S = 60.0
"""Seconds that its last answer stands in for it: Serve has started another owner within them."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an Ingress has whatever stands behind it."""

    live: LiveConfig
    mailbox: Mailbox
    observer: CallObserver
    keyring: Keyring
    app_name: str
    store: str | None

    def adapters(self, model: str = "") -> AdapterNames:
        """Names of adapters, which outlive this process; those of another application or model are others."""
        own = self.store or f"app-{self.app_name}"
        return AdapterNames(f"{own}-{slug(model)}" if model else own)

    def client(self, app_name: str, config: Config) -> ServeRouterClient:
        """The client of a pair's Routers."""
        return ServeRouterClient(
            serve.get_deployment_handle("Router", app_name=app_name),
            # Seconds by which a call to the router outlives the router's own request deadline, so that its
            # message arrives.
            timeout_s=config.router.request_timeout_s + 10.0,
            mailbox=self.mailbox,
            choice=shared_choice(app_name) if routes_by_prefix(config) else None,
            on_choice=self.observer.metrics.observe_choice,
        )


class Handler(InferenceHandler, Protocol):
    """A gRPC handler that lets calls in."""

    def admitter(self, keyring: Keyring) -> Admitter: ...
    def refused(self, method: str, error: Exception) -> None: ...


class Behind(Protocol):
    """What endpoints need of what stands behind them."""

    @property
    def admission(self) -> Admission: ...
    @property
    def observer(self) -> CallObserver: ...
    @property
    def keyring(self) -> Keyring: ...
    @property
    def deployments(self) -> tuple[str, ...]:
        """Names of the deployments that live values are brought to."""
        ...

    def http_app(self, lifespan: Lifespan, *, names_answers: bool) -> FastAPI: ...
    def grpc_handler(self) -> Handler: ...
    def named_ends(self) -> str:
        """The tokens that end an output, for people."""
        ...


class OnePair:
    """One pair, whose Routers are in the application of the Ingress."""

    def __init__(self, parts: Parts) -> None:
        config = parts.live.now
        self._parts = parts
        self.observer, self.keyring = parts.observer, parts.keyring
        self.deployments = ("Ingress", "Router", *(["Draft"] if config.draft.has_replicas else []))
        self.admission = Admission.of(parts.client(parts.app_name, config), config, store=parts.adapters())
        self._tokenizer, self._compiler = _loaded_tokenizer(config)

    def http_app(self, lifespan: Lifespan, *, names_answers: bool) -> FastAPI:
        app, deployments = self._parts.app_name, self.deployments

        async def there() -> Sequence[Deployment]:
            return [(app, name) for name in deployments]

        return build_http_app(
            client=self.admission,
            tokenizer=self._tokenizer,
            config=self._parts.live,
            keyring=self.keyring,
            lifespan=lifespan,
            observer=self.observer,
            metrics_text=AllMetrics(there).text,
            names_answers=names_answers,
            compiler=self._compiler,
        )

    def grpc_handler(self) -> GrpcIngress:
        return GrpcIngress(
            client=self.admission,
            tokenizer=self._tokenizer,
            config=self._parts.live,
            observer=self.observer,
            compiler=self._compiler,
        )

    def named_ends(self) -> str:
        return self._tokenizer.named_ends() or "no token"


class SeveralModels:
    """Several models, each with Routers in an application of its own."""

    def __init__(self, parts: Parts) -> None:
        config = parts.live.now
        self._parts = parts
        self.observer, self.keyring = parts.observer, parts.keyring
        self.deployments = ("Ingress",)
        self.catalog = ModelCatalog(config, ServeOwner(parts.app_name), self._make)
        self._routers = SeveralRouters(self.catalog)
        self.admission = Admission.of(self._routers, config)

    async def _make(self, model: ModelConfig) -> ModelAnswers:
        service = self._parts.live
        config = service.now.of_model(model.name)
        tokenizer, compiler = await asyncio.to_thread(_loaded_tokenizer, config)
        admission = self.admission.to_model(
            self._parts.client(app_of(model.name), config),
            config,
            store=self._parts.adapters(model.name),
            aliases=model.aliases,
        )
        live = LiveConfig(config)
        service.listen(lambda now: _follow(live, now.of_model(model.name)))
        app = new_app()
        limits = add_call_routes(app, admission, tokenizer, live, compiler)
        grpc = GrpcIngress(
            client=admission, tokenizer=tokenizer, config=live, observer=self.observer, compiler=compiler
        )
        return ModelAnswers(model, app, grpc, admission, limits)

    def http_app(self, lifespan: Lifespan, *, names_answers: bool) -> FastAPI:
        config = self._parts.live.now
        names = {app_of(name): name for name in self.catalog.models} if config.metrics.vllm_names else {}
        return build_several_app(
            catalog=self.catalog,
            routers=self._routers,
            config=self._parts.live,
            admission=self.admission,
            keyring=self.keyring,
            observer=self.observer,
            metrics_text=AllMetrics(self._there, models=names).text,
            lifespan=lifespan,
            names_answers=names_answers,
        )

    async def _there(self) -> Sequence[Deployment]:
        """The deployments of those models that are loaded."""
        own = [(self._parts.app_name, name) for name in ("Ingress", "Models")]
        for name, status in (await self.catalog.owner.statuses()).items():
            if status.state is ModelState.LOADED:
                own.append((app_of(name), "Router"))
                model = self.catalog.models[name]
                if model.draft.pool is None and model.draft.has_replicas:
                    own.append((app_of(name), "Draft"))
        return own

    def grpc_handler(self) -> SeveralGrpcIngress:
        most = self._parts.live.now.grpc.max_message_bytes
        return SeveralGrpcIngress(self.catalog, self.admission, self.observer, max_bytes=most)

    def named_ends(self) -> str:
        return "by model"


def _follow(live: LiveConfig, now: Config) -> None:
    live.set(split(now)[1])


class ServeOwner:
    """catalog.Owner over a handle of the Models deployment."""

    def __init__(self, app_name: str) -> None:
        self._handle: DeploymentHandle[Any] = serve.get_deployment_handle("Models", app_name=app_name)
        self._last: tuple[float, Mapping[str, ModelStatus]] | None = None
        """Time of its last answer about states, and the answer."""

    async def load(self, name: str, timeout_s: float) -> ModelStatus:
        status: ModelStatus = await self._call(
            lambda: self._handle.load.remote(name, timeout_s), timeout_s + OWNER_GRACE_S
        )
        return status

    async def unload(self, name: str, timeout_s: float) -> ModelStatus:
        status: ModelStatus = await self._call(
            lambda: self._handle.unload.remote(name, timeout_s), timeout_s + OWNER_GRACE_S
        )
        return status

    async def statuses(self) -> Mapping[str, ModelStatus]:
        now = asyncio.get_running_loop().time()
        try:
            statuses: Mapping[str, ModelStatus] = await self._call(self._handle.statuses.remote, STATUS_S)
        except EngineLostError:
            # Loaded models serve on without it.
            if self._last is None or now - self._last[0] > STALE_S:
                raise
            return self._last[1]
        self._last = now, statuses
        return statuses

    async def _call(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """Asks the owner; another that takes its place within the time is asked again."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                async with asyncio.timeout_at(end_s):
                    return raise_if_error(await call())
            except TimeoutError:
                raise EngineLostError(f"the owner of models did not answer within {timeout_s:g} s") from None
            except SERVE_ERRORS as error:
                if asyncio.get_running_loop().time() + 1.0 > end_s:
                    raise EngineLostError(f"the owner of models was lost: {error}") from error
            await asyncio.sleep(0.5)


def _loaded_tokenizer(config: Config) -> tuple[Tokenizer, PreparedCompiler]:
    tokenizer = load_tokenizer(config.target.model)
    warm_up(tokenizer)
    compiler = PreparedCompiler.of(tokenizer)
    compiler.prepare()
    return tokenizer, compiler
