"""Which steps the target is told of ahead: plain ones that plain ones follow."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from specray.draft_tokens import NO_DRAFT, LookaheadBudget
from specray.fakes import FakeTarget, LocalVerifier, NoisyGuesser, RandomGuesser, ToyModel, VirtualClock
from specray.requests import GenerateRequest, SpeculationParams
from specray.router.session.session import Session
from specray.router.session.values import NextDraft
from specray.types import DraftKind, VerifyItem
from tests.unit.router.harness import MODEL, fake_draft, fake_target, in_virtual_time, request, serving
from tests.unit.router.session.harness import ROOM, decoding, new_session, propose

OFF = SpeculationParams(enabled=False)


class NotedVerifier(LocalVerifier):
    """Notes the items that reach the target."""

    items: list[VerifyItem]

    async def verify(self, items: Sequence[VerifyItem], released: Sequence[str] = ()) -> None:
        self.items += items
        await super().verify(items, released)


@in_virtual_time
async def items_of(clock: VirtualClock, *given: GenerateRequest, **options: Any) -> list[VerifyItem]:
    """What the target is sent for requests."""
    target: FakeTarget = options.pop("target", None) or fake_target()
    verifier = NotedVerifier(target, clock)
    verifier.items = []
    async with serving(clock, target=target, verifier=verifier, **options) as pair:
        await asyncio.gather(*map(pair.router.complete, given))
        await pair.settle()
    return verifier.items


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (request(max_tokens=5, speculation=OFF), {}),
        (request(max_tokens=5), {"num_speculative_tokens": 0}),
        (request(max_tokens=5), {"has_draft_model": False}),
        (request(max_tokens=5, speculation=OFF), {"overlap": "enumerate"}),
    ],
)
def test_plain_decoding_runs_on_until_its_last_token(given: GenerateRequest, options: dict[str, Any]) -> None:
    items = items_of(given, **options)
    # The first computes the prompt, and its token is the first of five.
    assert [item.runs_on for item in items] == [True, True, True, True, False]


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 2, "overlap": "serial"},
        {"has_draft_model": False, "draft_kind": DraftKind.LOOKAHEAD},
    ],
)
def test_nothing_runs_on_where_draft_tokens_may_come(options: dict[str, Any]) -> None:
    assert not any(item.runs_on for item in items_of(request(max_tokens=12), **options))


@pytest.mark.parametrize(("step_s", "num_first"), [(0.020, 2), (0.100, 3)])
def test_the_only_session_runs_on_after_rounds_without_anything(step_s: float, num_first: int) -> None:
    target = FakeTarget(MODEL, cost=lambda rows: int(step_s * 1e9))
    items = items_of(request(max_tokens=7), has_draft_model=False, draft_kind=DraftKind.NGRAM, target=target)
    # The first computes the prompt, and the last token needs no further one.
    assert [item.runs_on for item in items] == [False] * num_first + [True] * (6 - num_first) + [False]


def test_of_several_sessions_none_runs_on_by_itself() -> None:
    options: dict[str, Any] = {"has_draft_model": False, "draft_kind": DraftKind.NGRAM}
    items = items_of(request(max_tokens=9), request("b", max_tokens=9), **options)
    assert not any(item.runs_on for item in items)


@pytest.mark.parametrize(
    "options",
    [
        {"has_draft_model": False, "draft_kind": DraftKind.NGRAM},
        {"fallback": "ngram", "overlap": "serial", "draft": fake_draft(RandomGuesser(MODEL))},
        {"fallback": "ngram", "overlap": "enumerate", "draft": fake_draft(RandomGuesser(MODEL))},
        {"fallback": "none", "overlap": "auto", "draft": fake_draft(NoisyGuesser(MODEL))},
    ],
)
def test_a_round_that_was_said_to_be_plain_is_plain(options: dict[str, Any]) -> None:
    """Whatever is found for it: a repetition that begins is verified one round later."""
    model = ToyModel(vocab_size=24, context_len=2)
    target = FakeTarget(model, cost=lambda rows: int((0.010 + 0.001 * rows) * 1e9))
    items = items_of(request(max_tokens=120), target=target, **options)
    pairs_of_items = list(itertools.pairwise(items))
    assert any(item.runs_on for item in items)
    assert any(item.draft for item in items)
    assert not any(item.runs_on and after.draft for item, after in pairs_of_items)


def test_a_lost_prediction_runs_on_where_one_matching_token_would_not_bring_it_back() -> None:
    given = request(max_tokens=6, speculation=SpeculationParams(enabled=True, prediction=(60, 61, 62, 63)))
    items = items_of(given, has_draft_model=False)
    # The first proposal is in vain, and from then on two tokens must match.
    assert [len(item.draft) for item in items] == [3, 0, 0, 0, 0, 0]
    assert [item.runs_on for item in items] == [False, True, True, True, True, False]


def test_a_round_with_draft_tokens_does_not_run_on() -> None:
    session = decoding()
    propose(session, (10, 11))
    assert session.verify_item(ROOM, is_plain_next=True).runs_on is False


def test_a_chunk_of_a_prompt_does_not_run_on() -> None:
    assert new_session().verify_item(2, is_plain_next=True).runs_on is False
    assert new_session().verify_item(ROOM, is_plain_next=True).runs_on is True


def test_the_last_token_does_not_run_on() -> None:
    assert decoding(max_tokens=3).verify_item(ROOM, is_plain_next=True).runs_on is True
    assert decoding(max_tokens=2).verify_item(ROOM, is_plain_next=True).runs_on is False


def test_where_the_target_drafts_nothing_runs_on() -> None:
    session: Session = decoding()
    session.target.lookahead = LookaheadBudget(2, 3, 2)
    assert session.verify_item(ROOM, is_plain_next=True).runs_on is False
    session = decoding()
    session.take_draft(NO_DRAFT, following=NextDraft(2))
    assert session.verify_item(ROOM, is_plain_next=True).runs_on is False
