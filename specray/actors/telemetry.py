"""Logs, spans and metrics of replicas, and the metrics of all replicas together."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from specray.actors.client import SERVE_ERRORS
from specray.config import Config
from specray.requests import RequestLife
from specray.telemetry.exposition import labelled, merged, with_vllm_names
from specray.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from specray.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)
R = TypeVar("R")

GATHER_TIMEOUT_S: Final = 5.0
"""Seconds to wait for the metrics of one deployment."""
STALE_S: Final = 60.0
"""Seconds that a deployment's last metrics stand in for it. While one replica hangs, Serve returns no answers
at all; within this time it has ended the replica."""


def replica_labels() -> dict[str, str]:
    """Labels of this replica, the same as in Serve's own metrics."""
    context = serve.get_replica_context()
    return {
        "application": context.app_name,
        "deployment": context.deployment,
        "replica": context.replica_id.unique_id,
    }


def begin_logs(config: Config) -> None:
    configure_logging(config.logging, context=replica_labels())


def begin_traces(config: Config, *, role: str) -> Tracing | None:
    """Makes this replica's tracer; None: traces are off.

    Raises:
        ConfigError: the package that exports spans is missing.
    """
    if config.telemetry.traces == "none":
        return None
    from specray.telemetry.tracing import make_tracing

    return make_tracing(config.telemetry, role=role)


class SpansElsewhere:
    """interfaces.RequestTracer that makes its spans on another event loop than the router's.

    Args:
        tracing: makes the spans.
        loop: event loop for that; times are converted from the router's monotonic clock there.
    """

    def __init__(self, tracing: Tracing, loop: asyncio.AbstractEventLoop) -> None:
        self._tracing = tracing
        self._loop = loop

    def request_ended(self, life: RequestLife, now: float) -> None:
        self._loop.call_soon_threadsafe(lambda: self._tracing.request_ended(life, time.monotonic()))


Deployment = tuple[str, str]
"""Names of an application and of a deployment in it."""


class AllMetrics:
    """Metrics of every replica of some deployments, each with the labels of its replica.

    Serve chooses which replica answers a scrape, so each replica must answer for all.

    Args:
        deployments: returns those that there are; their replicas have a method ``metrics_text``.
        models: models of applications, whose metrics get vLLM's names, too.
        monotonic: clock in seconds.
    """

    def __init__(
        self,
        deployments: Callable[[], Awaitable[Sequence[Deployment]]],
        *,
        models: Mapping[str, str] = MappingProxyType({}),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._last: dict[tuple[Deployment, str], tuple[float, list[str]]] = {}
        """Last answer of each deployment and node: time in seconds, texts."""
        self._deployments = deployments
        self._models = models
        self._handles: dict[Deployment, DeploymentHandle[object]] = {}

    async def text(self, scope: str = "service") -> str:
        """All metrics in Prometheus text format; with the scope ``node``, those of this node's replicas.

        Replicas that fail are left out. A deployment that does not answer in time is represented by its last
        answer, for STALE_S.
        """
        node_id = ray.get_runtime_context().get_node_id() if scope == "node" else ""
        there = await self._deployments()
        texts = await asyncio.gather(*(self._of(each, node_id) for each in there))
        return merged(text for replicas in texts for text in replicas)

    async def _of(self, name: Deployment, node_id: str) -> list[str]:
        if name not in self._handles:
            self._handles[name] = serve.get_deployment_handle(name[1], app_name=name[0])
        try:
            response = self._handles[name].broadcast("metrics_text", node_id)
            results = await response.results_async(timeout_s=GATHER_TIMEOUT_S, return_exceptions=True)
        except TimeoutError:
            said_s, texts = self._last.get((name, node_id), (0.0, []))
            logger.warning("%s did not return its metrics within %g s", name[1], GATHER_TIMEOUT_S)
            return texts if self._monotonic() - said_s <= STALE_S else []
        except SERVE_ERRORS as error:
            # A deployment without replicas is normal: a Draft may be scaled to none.
            logger.debug("no metrics of %s: %s", name[1], str(error) or type(error).__name__)
            return []
        texts = [result for result in results if isinstance(result, str)]
        if (model := self._models.get(name[0])) is not None:
            texts = [with_vllm_names(text, model) for text in texts]
        self._last[name, node_id] = self._monotonic(), texts
        return texts


def shown_by_node(text: Callable[[R], Awaitable[str]]) -> Callable[[R, str], Awaitable[str]]:
    """Makes a replica's ``metrics_text``, which ``AllMetrics`` asks for, of what its metrics are.

    They get the replica's labels. The result takes the id of a node: the text is empty on any other; an
    empty id is every node.
    """

    @functools.wraps(text)
    async def metrics_text(replica: R, node_id: str = "") -> str:
        if node_id not in ("", ray.get_runtime_context().get_node_id()):
            return ""
        return labelled(await text(replica), replica_labels())

    return metrics_text
