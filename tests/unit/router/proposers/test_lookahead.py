"""Lookahead decoding in service: who asks the target to look ahead, and what becomes of what it finds."""

from __future__ import annotations

import asyncio

import pytest

from specray.draft_tokens import LookaheadBudget
from specray.fakes import FakeTarget, NoisyGuesser, PerfectGuesser, RandomGuesser, VirtualClock
from specray.fakes.models import ToyGuesser
from specray.requests import GenerateRequest, OutputChunk, SpeculationParams
from specray.types import DraftKind
from tests.unit.router.harness import MODEL, Pair, expected, in_virtual_time, request, serving

KIND = DraftKind.LOOKAHEAD
GUESSERS: dict[str, ToyGuesser] = {
    "perfect": PerfectGuesser(MODEL),
    "noisy": NoisyGuesser(MODEL),
    "random": RandomGuesser(MODEL),
}


def target_of(guesser: ToyGuesser | None, row_s: float = 0.0) -> FakeTarget:
    """A target of 20 ms per step, and of so much per row."""
    return FakeTarget(MODEL, cost=lambda rows: int(1e9 * (0.020 + row_s * rows)), ahead=guesser)


@in_virtual_time
async def serve(
    clock: VirtualClock,
    given: list[GenerateRequest],
    guesser: ToyGuesser | None,
    *,
    row_s: float = 0.0,
    **options: object,
) -> tuple[list[OutputChunk], Pair, float]:
    """The outputs, and the seconds that they took."""
    options.setdefault("draft_kind", KIND)
    async with serving(clock, target=target_of(guesser, row_s), has_draft_model=False, **options) as pair:
        started = clock.monotonic()
        outputs = await asyncio.gather(*(pair.router.complete(each) for each in given))
        seconds = clock.monotonic() - started
        await pair.settle()
        return list(outputs), pair, seconds


def test_what_is_found_is_verified_in_the_next_step() -> None:
    """Four tokens of an n-gram and the target's own: a step for five."""
    [output], pair, seconds = serve(
        [request("a", max_tokens=51)], GUESSERS["perfect"], num_speculative_tokens=8
    )
    assert len(output.token_ids) == 51 and pair.target.num_steps == 11
    assert seconds == pytest.approx(0.020 * 11, rel=0.01)


def test_a_request_may_ask_for_it_and_others_have_no_window() -> None:
    wish = SpeculationParams(draft=KIND)
    asked = [request("a", max_tokens=30, speculation=wish), request("b", max_tokens=30)]
    outputs, pair, _ = serve(asked, GUESSERS["perfect"], draft_kind=DraftKind.NGRAM)
    assert [output.token_ids for output in outputs] == [expected(each) for each in asked]
    assert 0 < len(pair.target.lookaheads) <= 10


@in_virtual_time
async def check_seconds(clock: VirtualClock, guesser: ToyGuesser, *, num_windows: int) -> None:
    """Lets a request look ahead where a row takes a tenth of a step, and checks what it took."""
    async with serving(
        clock, target=target_of(guesser, 0.002), draft_kind=KIND, has_draft_model=False
    ) as pair:
        taken: list[float] = []
        for name, wish in (("plain", SpeculationParams(enabled=False)), ("ahead", SpeculationParams())):
            started = clock.monotonic()
            await pair.router.complete(request(name, max_tokens=2000, speculation=wish))
            taken.append(clock.monotonic() - started)
        asked = len(pair.target.lookaheads)
        assert 0 < asked < num_windows
        assert taken[1] < 1.15 * taken[0]


@pytest.mark.slow
def test_windows_that_bring_nothing_end_where_rows_are_dear() -> None:
    """27 rows take 2.7 steps: some tries, and then as fast as without."""
    check_seconds(RandomGuesser(MODEL), num_windows=100)


def test_windows_that_pay_stay() -> None:
    _, pair, _ = serve([request("a", max_tokens=500)], GUESSERS["perfect"], row_s=0.0002)
    assert len(pair.target.lookaheads) == pair.target.num_steps


def test_the_budget_is_that_of_the_configuration() -> None:
    [_], pair, _ = serve(
        [request("a", max_tokens=50)], GUESSERS["perfect"], num_speculative_tokens=8, lookahead="2x3x1"
    )
    assert set(pair.target.lookaheads) == {LookaheadBudget(2, 3, 1)}
    # The first token, and then three a step: two of an n-gram and the target's own.
    assert pair.target.num_steps == 1 + 17
