"""The Models deployment: deploys and deletes the applications of several models, and only one of it does.

Each model is an application of its own, so that a load disturbs no other. If this replica dies, loaded models
serve on; Serve starts another, which takes over the applications that it finds.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray import serve

from specray.actors.answers import error_as_value
from specray.actors.models.applications import ServeApplications, ServeIngresses
from specray.actors.node import keep_serve_on_loopback
from specray.actors.telemetry import begin_logs, shown_by_node
from specray.config import Config, parse_config
from specray.errors import SpecrayError
from specray.loading.needs import entry_of
from specray.loading.owner import ModelOwner, ModelStatus
from specray.loading.table import ModelState, ModelTable, Room
from specray.telemetry.models import ModelMetrics

_GIB = 2.0**30


def models_deployment() -> serve.Deployment:
    """The Models, to be bound."""
    deployment: serve.Deployment = serve.deployment(
        name="Models",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,
        health_check_period_s=1,
        health_check_timeout_s=5,
        max_constructor_retry_count=3,
    )(ModelsReplica)
    return deployment


class ModelsReplica:
    """A Serve replica around a ModelOwner. Errors for the caller are answers, see ``actors.answers``."""

    async def __init__(self, values: dict[str, Any], store: str | None = None) -> None:  # type: ignore[misc]
        config = parse_config(values)
        keep_serve_on_loopback()
        begin_logs(config)
        context = serve.get_replica_context()
        room = await asyncio.to_thread(_room, config)
        self._metrics = ModelMetrics()
        self._applications = ServeApplications(config, store or f"{context.app_name}-models")
        remembered = await self._applications.remembered()
        self._owner = ModelOwner(
            ModelTable([entry_of(config, each, remembered.get(each.name)) for each in config.models], room),
            self._applications,
            ServeIngresses(context.app_name),
            changed=self._metrics.observe,
        )
        self._work = asyncio.create_task(self._owner.run())
        unwanted = await self._applications.unwanted()
        self._wanted = [
            asyncio.create_task(self.load(each.name, config.router.start_timeout_s))
            for each in config.models
            if each.load == "start" and each.name not in unwanted
        ]

    async def load(self, name: str, timeout_s: float) -> ModelStatus | SpecrayError:
        await self._applications.note(name, is_wanted=True)
        return await error_as_value(self._owner.load(name, timeout_s=timeout_s))

    async def unload(self, name: str, timeout_s: float) -> ModelStatus | SpecrayError:
        await self._applications.note(name, is_wanted=False)
        return await error_as_value(self._owner.unload(name, timeout_s=timeout_s))

    async def statuses(self) -> dict[str, ModelStatus]:
        return self._owner.statuses()

    @shown_by_node
    async def metrics_text(self) -> str:
        return self._metrics.text(
            {name: each.state is ModelState.LOADED for name, each in self._owner.statuses().items()},
            {name: each.memory_gib * _GIB for name, each in self._owner.statuses().items()},
        )

    async def check_health(self) -> None:
        """Raises what has ended the owner; Serve replaces it."""
        if self._work.done():
            self._work.result()


def _room(config: Config) -> Room:
    resources = ray.cluster_resources()
    memory = resources.get("memory", 0.0)
    if config.loading.memory_gib != "auto":
        memory = config.loading.memory_gib * _GIB
    return Room(memory, resources.get("GPU", 0.0))
