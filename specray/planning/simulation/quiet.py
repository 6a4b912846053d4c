"""Metrics of routers that nobody scrapes: counting every round is a fifth of a simulation's work."""

from __future__ import annotations

from specray.metrics.router import RouterMetrics


class QuietMetrics(RouterMetrics):
    """Counts nothing of rounds; what is rare is counted as ever."""

    def observe_round(self, num_drafts: int, num_accepted: int, source: str = "model") -> None:
        """Nothing."""

    def observe_plan(self, overlap: str, num_speculative_tokens: int, reason: str) -> None:
        """Nothing."""

    def observe_lookup(self, result: str, depth: int) -> None:
        """Nothing."""

    def observe_tokens(self, num_tokens: int, seconds: float) -> None:
        """Nothing."""

    def observe_first_tokens(self, num_tokens: int, seconds: float) -> None:
        """Nothing."""
