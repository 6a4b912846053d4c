"""Applications of models in Ray Serve, and all Ingresses before them, as the owner of models sees them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import Any, Final

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from specray.actors.causes import root_cause
from specray.actors.client import SERVE_ERRORS
from specray.actors.live import read_stored, write_stored
from specray.actors.pair import bind_pair, draft_deployment
from specray.config import Config
from specray.config.live import digest
from specray.config.models import slug
from specray.loading.owner import ModelLoadError, ModelUse
from specray.loading.table import ModelState

logger = logging.getLogger(__name__)

POLL_S: Final = 0.25
ANSWER_S: Final = 5.0
"""Seconds for all Ingresses to answer one question."""
_COMING: Final = (ApplicationStatus.NOT_STARTED, ApplicationStatus.DEPLOYING)
_THERE: Final = (ApplicationStatus.RUNNING, ApplicationStatus.UNHEALTHY)
_NO_MEMORY: Final = ("OutOfMemory", "too little memory", "MemoryError", "Cannot allocate memory")


def app_of(model: str) -> str:
    """The name of a model's application."""
    return f"specray-{slug(model)}"


def app_of_pool(pool: str) -> str:
    """The name of the application of a draft that models share; unlike that of any model."""
    return f"shared-draft-{slug(pool)}"


def store_of(store: str, model: str) -> str:
    """The key under which a service keeps the live values of one of its models."""
    return f"{store}-{slug(model)}"


def store_key(store: str) -> str:
    """The key under which a service keeps what it has deployed."""
    return f"{store}-deployed"


class ServeApplications:
    """owner.Applications over Ray Serve.

    Args:
        store: prefix of the keys under which live values of models are kept, and what is deployed: the
            digest of each application's configuration, the models that were unloaded by a call, and the bytes
            that models take, by the digests of their configurations.
    """

    def __init__(self, config: Config, store: str) -> None:
        self._config = config
        self._store = store
        self._names = {app_of(each.name): each.name for each in config.models}
        self._writing = Lock()
        self._handles: dict[tuple[str, str], DeploymentHandle[Any]] = {}
        """Handles by model and deployment; each that is made has a task that follows its replicas."""

    async def found(self) -> Mapping[str, ModelState]:
        return await asyncio.to_thread(self._found)

    def _found(self) -> Mapping[str, ModelState]:
        found, deployed = dict[str, ModelState](), self._deployed()
        for app, overview in serve.status().applications.items():
            name = self._names.get(app)
            if name is None:
                if app in deployed["digests"]:
                    # The configuration has it no longer.
                    serve.delete(app)
                continue
            is_as_configured = deployed["digests"].get(app) == self._digest(name)
            if overview.status in _COMING and is_as_configured:
                found[name] = ModelState.LOADING
            elif overview.status in _THERE and is_as_configured:
                found[name] = ModelState.LOADED
            else:
                # One that failed, or that was deployed with another configuration, is loaded anew.
                found[name] = ModelState.DRAINING
        return found

    async def load(self, name: str) -> None:
        """See owner.Applications. A pool that the model shares comes first."""
        model = next(each for each in self._config.models if each.name == name)
        config = self._config.of_model(name)
        draft = None
        if model.draft.pool is not None:
            app = app_of_pool(model.draft.pool)
            await self._run(app, partial(self._run_pool, model.draft.pool), config.router.start_timeout_s)
            draft = serve.get_deployment_handle("Draft", app_name=app)
        await self._run(app_of(name), partial(self._run_model, name, draft), config.router.start_timeout_s)

    def _run_pool(self, pool: str) -> None:
        config = self._config.of_pool(pool)
        bound = draft_deployment(config).bind(config.model_dump(mode="json"), None)
        _run_app(serve.RunTarget(bound, name=app_of_pool(pool), route_prefix=None))

    def _run_model(self, name: str, draft: DeploymentHandle[Any] | None) -> None:
        self._keep("digests", lambda digests: {**digests, app_of(name): self._digest(name)})
        bound = bind_pair(self._config.of_model(name), store=store_of(self._store, name), draft=draft)
        _run_app(serve.RunTarget(bound, name=app_of(name), route_prefix=None))

    async def _run(self, app: str, run: Callable[[], None], timeout_s: float) -> None:
        """Starts an application that is not there, and waits until it runs. Raises ModelLoadError."""
        end_s = time.monotonic() + timeout_s
        if (await asyncio.to_thread(_overview, app)) is None:
            await asyncio.to_thread(run)
        while True:
            overview = await asyncio.to_thread(_overview, app)
            if overview is not None and overview.status is ApplicationStatus.RUNNING:
                return
            reason = ""
            if time.monotonic() > end_s:
                reason = f"it did not start within {timeout_s:g} s"
            elif overview is None:
                reason = "its application was deleted"
            elif overview.status is ApplicationStatus.DEPLOY_FAILED:
                parts = [overview.message, *(part.message for part in overview.deployments.values())]
                reason = root_cause(parts)
            if reason:
                await asyncio.to_thread(serve.delete, app)
                raise ModelLoadError(reason, is_memory=any(word in reason for word in _NO_MEMORY))
            await asyncio.sleep(POLL_S)

    async def unload(self, name: str) -> None:
        await asyncio.to_thread(serve.delete, app_of(name))
        # A pool goes with the last of its models.
        pool = next(each for each in self._config.models if each.name == name).draft.pool
        if pool is not None:
            others = [app_of(each.name) for each in self._config.models if each.draft.pool == pool]
            there = await asyncio.to_thread(lambda: set(serve.status().applications))
            if not there.intersection(others):
                await asyncio.to_thread(serve.delete, app_of_pool(pool))

    def _deployed(self) -> dict[str, Any]:
        return {"digests": {}, "unwanted": [], "bytes": {}, **(read_stored(store_key(self._store)) or {})}

    def _keep(self, field: str, change: Callable[[Any], Any]) -> None:
        with self._writing:
            deployed = self._deployed()
            after = change(deployed[field])
            if after != deployed[field]:
                write_stored(store_key(self._store), {**deployed, field: after})

    async def measure(self, name: str) -> int:
        """See owner.Applications."""
        model = next(each for each in self._config.models if each.name == name)
        has_own_draft = model.draft.pool is None and model.draft.has_replicas
        deployments = ("Router", *(["Draft"] if has_own_draft else []))
        for each in deployments:
            if (name, each) not in self._handles:
                self._handles[name, each] = serve.get_deployment_handle(each, app_name=app_of(name))
        handles = [self._handles[name, each] for each in deployments]
        answers = await asyncio.gather(*(ask_all(handle, "memory_bytes") for handle in handles))
        # Of some alone it would be too little.
        is_whole = all(found and all(isinstance(each, int) for each in found) for found in answers)
        return sum(map(sum, answers)) if is_whole else 0

    async def remember(self, name: str, num_bytes: int) -> None:
        """See owner.Applications."""
        change = partial(self._with_bytes, name, num_bytes)
        await asyncio.to_thread(self._keep, "bytes", change)

    def _with_bytes(self, name: str, num_bytes: int, known: dict[str, int]) -> dict[str, int]:
        # What is configured no longer is forgotten.
        digests = {self._digest(each) for each in self._names.values()}
        return {
            **{key: value for key, value in known.items() if key in digests},
            self._digest(name): num_bytes,
        }

    async def remembered(self) -> dict[str, int]:
        """Bytes that models were seen to take when they were loaded as they are configured now."""
        known = (await asyncio.to_thread(self._deployed))["bytes"]
        digests = {name: self._digest(name) for name in self._names.values()}
        return {name: known[digest] for name, digest in digests.items() if digest in known}

    async def unwanted(self) -> set[str]:
        """Models that were unloaded by a call, and not loaded since."""
        return set((await asyncio.to_thread(self._deployed))["unwanted"])

    async def note(self, name: str, *, is_wanted: bool) -> None:
        """Keeps whether the model was unloaded by a call, for an owner that starts later."""

        def change(unwanted: list[str]) -> list[str]:
            return sorted({*unwanted} - {name} if is_wanted else {*unwanted, name})

        await asyncio.to_thread(self._keep, "unwanted", change)

    def _digest(self, name: str) -> str:
        return digest(self._config.of_model(name).model_dump(mode="json"))


class ServeIngresses:
    """owner.Ingresses over a handle of the Ingress deployment."""

    def __init__(self, app_name: str) -> None:
        self._handle: DeploymentHandle[Any] = serve.get_deployment_handle("Ingress", app_name=app_name)

    async def usage(self) -> Mapping[str, ModelUse]:
        """What those that answer know; of none, nothing."""
        total = dict[str, ModelUse]()
        for uses in await self._ask("model_usage"):
            for name, use in uses.items() if isinstance(uses, dict) else ():
                other = total.get(name)
                total[name] = (
                    use
                    if other is None
                    else ModelUse(other.num_users + use.num_users, min(other.idle_s, use.idle_s))
                )
        return total

    async def close(self, name: str, *, is_forced: bool) -> bool:
        answers = await self._ask("close_model", name, is_forced)
        return is_forced or (bool(answers) and all(answer is True for answer in answers))

    async def _ask(self, method: str, *args: object) -> list[Any]:
        return await ask_all(self._handle, method, *args)


async def ask_all(handle: DeploymentHandle[Any], method: str, *args: object) -> list[Any]:
    """The answers of all replicas of a deployment, errors among them; none where it does not answer."""
    try:
        response = handle.broadcast(method, *args)
        return list(await response.results_async(timeout_s=ANSWER_S, return_exceptions=True))
    except (TimeoutError, *SERVE_ERRORS) as error:
        logger.warning("no answers to %s: %s", method, error or type(error).__name__)
        return []


def _run_app(target: serve.RunTarget) -> None:
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _overview(app: str) -> Any:
    return serve.status().applications.get(app)
