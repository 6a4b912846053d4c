"""Metrics of loading and unloading models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from specray.telemetry.exposition import registry_text


class ModelMetrics:
    """What the owner of models shows of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        gauge = partial(Gauge, registry=self.registry)
        self._changes = Counter(
            "specray_model_loads",
            "Loads and unloads of models that have ended, by their result.",
            ["model_name", "result"],
            registry=self.registry,
        )
        self._loaded = gauge("specray_model_loaded", "1 for a model that is loaded, else 0.", ["model_name"])
        self._memory = gauge(
            "specray_model_memory_bytes",
            "Bytes that a model takes, or would take: the most that was measured, else an estimate.",
            ["model_name"],
        )

    def observe(self, model: str, result: str) -> None:
        """Counts the end of a load or an unload: loaded, failed or unloaded."""
        self._changes.labels(model, result).inc()

    def text(self, loaded: Mapping[str, bool], memory_bytes: Mapping[str, float]) -> str:
        """All metrics in Prometheus text format; the arguments are by the names of all models."""
        for name, is_loaded in loaded.items():
            self._loaded.labels(name).set(is_loaded)
            self._memory.labels(name).set(memory_bytes[name])
        return registry_text(self.registry)
