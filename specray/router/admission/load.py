"""How busy a router is, for those who choose between routers."""

from __future__ import annotations

from specray.control.cost_model import CostModel
from specray.requests import RouterLoad
from specray.router.admission.sessions import Sessions


class LoadTeller:
    """Says how busy a router is, in figures that are numbered.

    Attributes:
        num_cache_tokens: tokens that fit the target's cache; 0: unknown.
    """

    def __init__(self, sessions: Sessions, cost_model: CostModel) -> None:
        self.num_cache_tokens = 0
        self._sessions = sessions
        self._cost_model = cost_model
        self._number = 0

    def say(self) -> RouterLoad:
        self._number += 1
        sessions, target = self._sessions, self._cost_model.target
        num_running = max(1, len(sessions.running))
        return RouterLoad(
            number=self._number,
            num_waiting_tokens=sessions.num_waiting_tokens,
            num_running=len(sessions),
            num_places=sessions.limit,
            prefill_tokens_per_s=target.num_prompt_rows / target.prompts_s if target.prompts_s else 0.0,
            step_s=self._cost_model.verify_s(num_running, num_running) or 0.0,
            num_cache_tokens=self.num_cache_tokens,
        )
