"""Router metrics that count no rounds, for simulations: counting them is a fifth of a simulation's work."""

from __future__ import annotations

from specray.telemetry.metrics import RouterMetrics


class QuietMetrics(RouterMetrics):
    """Counts nothing of rounds; rare events are counted as always."""

    def observe_round(self, num_drafts: int, num_accepted: int, source: str = "model") -> None:
        """Does nothing."""

    def observe_plan(self, overlap: str, num_speculative_tokens: int, reason: str) -> None:
        """Does nothing."""

    def observe_lookup(self, result: str, depth: int) -> None:
        """Does nothing."""

    def observe_tokens(self, num_tokens: int, seconds: float) -> None:
        """Does nothing."""

    def observe_first_tokens(self, num_tokens: int, seconds: float) -> None:
        """Does nothing."""
