"""Metrics of a simulated router, of which nobody reads most."""

from __future__ import annotations

from specray.telemetry.metrics import RouterMetrics


class QuietMetrics(RouterMetrics):
    """Counts rare events alone: counting rounds is a fifth of a simulation's work."""

    def observe_round(self, num_drafts: int, num_accepted: int, source: str = "model") -> None:
        pass

    def observe_plan(self, overlap: str, num_speculative_tokens: int, reason: str) -> None:
        pass

    def observe_lookup(self, result: str, depth: int) -> None:
        pass

    def observe_tokens(self, num_tokens: int, seconds: float) -> None:
        pass

    def observe_first_tokens(self, num_tokens: int, seconds: float) -> None:
        pass
