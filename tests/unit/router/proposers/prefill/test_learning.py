"""What is learnt from steps that read: nothing of the draft's own, and when a try may begin."""

from __future__ import annotations

import asyncio

import pytest

from specray.control.controller import Controller
from specray.control.cost_model import CostModel
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.fakes import VirtualClock
from specray.types import DraftReply, Proposal, SpeculateItem
from tests.unit.router.harness import (
    TARGET_S,
    budgets,
    request,
    router_config,
    serving,
    speculation_config,
)
from tests.unit.router.proposers.prefill.harness import LONG, RecordingDraft, complete, until_piece


def piece(request_id: str, num_tokens: int) -> tuple[SpeculateItem, DraftReply]:
    item = SpeculateItem(request_id, 1, 100, (1,) * num_tokens, 0)
    return item, Proposal(request_id, 1, 100, NO_DRAFT)


def proposal(request_id: str) -> tuple[SpeculateItem, DraftReply]:
    return SpeculateItem(request_id, 1, 100, (1,), 4), Proposal(request_id, 1, 100, DraftTokens((1, 2, 3, 4)))


@pytest.mark.parametrize("num_tokens", [6, 200])
def test_steps_with_a_piece_say_nothing_of_the_draft(num_tokens: int) -> None:
    controller = Controller(speculation_config())
    controller.cost_model.observe_draft_step([proposal("a"), piece("b", num_tokens)], 0.040, 0.002)
    controller.cost_model.observe_draft_step([piece("b", num_tokens)], 0.040, 0.002)
    assert budgets(controller).patience_s() is None
    controller.cost_model.observe_draft_step([proposal("a")], 0.040, 0.002)
    assert budgets(controller).patience_s() is not None


async def test_steps_that_also_worked_for_sessions_which_have_ended_are_not_learnt(
    clock: VirtualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learnt: list[list[tuple[str, int]]] = []

    observe = CostModel.observe_draft_step

    def record(self: CostModel, answered: list[tuple[SpeculateItem, DraftReply]], *times: float) -> None:
        learnt.append([(item.request_id, item.base_len) for item, _ in answered])
        observe(self, answered, *times)

    monkeypatch.setattr(CostModel, "observe_draft_step", record)
    draft = RecordingDraft(token_s=0.001)
    async with serving(clock, draft=draft, overlap="serial", num_speculative_tokens=3) as pair:
        left = asyncio.create_task(pair.router.complete(request("a", LONG[:60])))
        stayed = asyncio.create_task(pair.router.complete(request("b", LONG[:60])))
        await asyncio.sleep(0.050)
        left.cancel()
        await stayed
        assert [item.request_id for item in draft.calls[0]] == ["a", "b"]
    assert learnt and learnt[0][0][0] == "b"
    assert all(base_len > 0 for answered in learnt for _, base_len in answered)


async def test_a_try_of_speculation_begins_when_the_draft_has_read_the_text(clock: VirtualClock) -> None:
    draft = RecordingDraft(token_s=0.001)
    config = router_config(prefill_chunk_tokens=64)
    async with serving(clock, draft=draft, config=config, overlap="serial", num_speculative_tokens=3) as pair:
        call = asyncio.create_task(complete(pair, request("a", LONG, max_tokens=200)))
        await until_piece(draft, 2)
        stats = pair.router.sessions.running["a"].stats
        # One of them is under way already.
        stats.is_exploring, stats.rounds_to_replan = True, 3
        await until_piece(draft, 4)
        await asyncio.sleep(4 * TARGET_S)
        assert stats.is_exploring and stats.rounds_to_replan in (2, 3)
        await call
        assert not stats.is_exploring
