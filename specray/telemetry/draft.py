"""What a Draft replica shows of itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from specray.engine_info import EngineInfo
from specray.telemetry.exposition import registry_text


class DraftMetrics:
    """What a Draft replica shows of itself, whoever leases it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "specray_draft_replica_"
        self._busy, self._routers, self._blocks, self._blocks_in_use = (
            Gauge(f"{prefix}{name}", text, registry=self.registry)
            for name, text in (
                ("busy_ratio", "Share of the last seconds that the engine spent computing."),
                ("routers", "Routers that hold a stream to it."),
                ("blocks", "Cache blocks there are."),
                ("blocks_in_use", "Cache blocks that are taken, by all routers."),
            )
        )

    def text(self, info: EngineInfo | None) -> str:
        """All metrics in Prometheus text format, by what the engine says of itself; None: it is gone."""
        self._busy.set(0 if info is None else info.busy_share)
        self._routers.set(0 if info is None else info.num_routers)
        self._blocks.set(0 if info is None else info.num_blocks)
        self._blocks_in_use.set(0 if info is None else info.num_blocks_in_use)
        return registry_text(self.registry)
