"""Collects the rounds of a request for a caller that watches it."""

from __future__ import annotations

from collections.abc import Callable

from specray.control.state import Plan
from specray.draft_tokens import NO_DRAFT, DraftTokens, SparseProbs
from specray.round_reports import EngineStep, RoundReport
from specray.router.session.values import Commit
from specray.types import VerifyItem


class RoundWatch:
    """The rounds of one request.

    Args:
        now: seconds on the router's clock.
        arrived_s: time of the request's arrival on that clock.
    """

    def __init__(self, now: Callable[[], float], arrived_s: float) -> None:
        self._now = now
        self._arrived_s = arrived_s
        self._asked_ms: float | None = None
        self._sent_ms = 0.0
        self._draft = NO_DRAFT
        self._lookup = ""
        self._drafting: list[EngineStep] = []
        self._reports: list[RoundReport] = []

    def draft_asked(self) -> None:
        self._asked_ms = self._ms()

    def draft_replied(self, forward_ns: int) -> None:
        if self._asked_ms is not None:
            self._drafting.append(EngineStep(self._asked_ms, self._ms(), forward_ns / 1e6))
        self._asked_ms = None

    def looked_up(self, result: str) -> None:
        self._lookup = result

    def verify_sent(self, item: VerifyItem) -> None:
        self._sent_ms, self._draft = self._ms(), item.draft

    def committed(self, commit: Commit, plan: Plan, forward_ns: int) -> None:
        """The target answered, and the output gained tokens."""
        draft = self._draft
        self._reports.append(
            RoundReport(
                token_ids=commit.token_ids,
                draft_token_ids=draft.token_ids,
                num_accepted_tokens=commit.num_kept_tokens,
                source=commit.source if len(draft) else "",
                lookup=self._lookup,
                overlap=plan.overlap_label,
                num_speculative_tokens=plan.num_speculative_tokens,
                reason=plan.reason.value,
                verify=EngineStep(self._sent_ms, self._ms(), forward_ns / 1e6),
                drafting=tuple(self._drafting),
                draft_parents=draft.parents,
                draft_probs=_probabilities(draft),
            )
        )
        self._lookup = ""
        self._drafting.clear()

    def take(self) -> tuple[RoundReport, ...]:
        """Returns the reports since the last call."""
        reports = tuple(self._reports)
        self._reports.clear()
        return reports

    def _ms(self) -> float:
        return 1e3 * (self._now() - self._arrived_s)


def _probabilities(draft: DraftTokens) -> tuple[float, ...]:
    return tuple(
        _probability(token_id, row) for token_id, row in zip(draft.token_ids, draft.probs, strict=False)
    )


def _probability(token_id: int, row: SparseProbs) -> float:
    return dict(zip(row.token_ids, row.probs, strict=True)).get(token_id, 0.0)
