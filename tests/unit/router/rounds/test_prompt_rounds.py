"""Prompts in rounds: what is cached takes none, and running sessions keep their pace meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from specray.control.controller import Controller
from specray.control.estimators import TimeTable
from specray.engine_info import EngineInfo, GrammarStats
from specray.errors import ProtocolError
from specray.fakes import FakeTarget, PerfectGuesser, VirtualClock
from specray.requests import SpeculationParams
from specray.router.draft_model.budgets import MIN_PREFILL_TOKENS
from specray.router.session.session import Session
from specray.telemetry.metrics import RouterMetrics
from specray.types import ItemFailed, TargetReplies, Verdict, VerifyItem
from tests.unit.router.harness import (
    MODEL,
    PROMPT,
    Pair,
    budgets,
    expected,
    fake_draft,
    request,
    router_config,
    serving,
    speculation_config,
)

LONG = tuple((7 * i) % 60 for i in range(300))
PLAIN = SpeculationParams(enabled=False)


def new_session(prompt: tuple[int, ...] = LONG) -> Session:
    return Session(request("a", prompt), None, vocab_size=64)


def answer(
    session: Session, next_token_id: int | None, *, held_len: int | None = None, cached: int = 0
) -> None:
    item = session.target.in_flight
    assert item is not None
    session.on_verdict(
        Verdict(
            "a",
            item.round_id,
            item.base_len,
            0,
            next_token_id,
            held_len=held_len,
            num_cached_tokens=cached,
        )
    )


# ---- the session


def test_the_first_chunk_tells_all_but_the_last_token_and_how_many_to_compute() -> None:
    session = new_session()
    item = session.verify_item(100)
    assert (item.token_ids, item.sample, item.max_new_tokens) == (LONG[:-1], False, 100)
    answer(session, None, held_len=100)
    item = session.verify_item(100)
    assert (item.base_len, item.token_ids, item.max_new_tokens) == (100, LONG[100:200], None)


def test_what_the_target_found_is_not_sent_again() -> None:
    session = new_session()
    session.verify_item(100)
    answer(session, None, held_len=288, cached=256)
    item = session.verify_item(100)
    assert (item.base_len, item.token_ids, item.sample) == (288, LONG[288:], True)
    answer(session, 5)
    assert session.num_cached_tokens == 256


def test_a_prompt_that_fits_goes_at_once() -> None:
    session = new_session()
    item = session.verify_item(300)
    assert (item.token_ids, item.sample, item.max_new_tokens) == (LONG, True, None)
    answer(session, 5, cached=32)
    assert session.num_cached_tokens == 32


def test_only_the_prompt_counts_as_cached() -> None:
    session = new_session()
    session.verify_item(300)
    answer(session, 5)
    session.lose_target()
    session.verify_item(301)
    answer(session, 6, cached=288)
    assert session.num_cached_tokens == 0


def test_a_prompt_that_starts_over_counts_anew() -> None:
    session = new_session()
    session.verify_item(100)
    answer(session, None, held_len=132, cached=32)
    item = session.verify_item(100)
    session.on_target_refused(ItemFailed("a", item.round_id, item.base_len, "no room", is_retriable=True))
    session.verify_item(300)
    answer(session, 5, cached=128)
    assert session.num_cached_tokens == 128


@pytest.mark.parametrize("held_len", [0, 300])
def test_a_target_that_holds_what_it_was_not_told_breaks_the_protocol(held_len: int) -> None:
    session = new_session()
    session.verify_item(100)
    with pytest.raises(ProtocolError, match="are held of 299"):
        answer(session, None, held_len=held_len)


# ---- the bound on a step


def test_room_is_what_fits_into_the_allowed_time() -> None:
    controller = Controller(speculation_config())
    for rows in (1, 64, 512):
        for _ in range(5):
            controller.cost_model.target.add(rows, 0.010 + 0.001 * rows, is_overlapped=False)
    # A step of one row takes 11 ms, so 22 and 49.5 ms are allowed: 12 and 39 rows.
    assert budgets(controller).prefill_tokens(1, 512, max_slowdown=2.0) == MIN_PREFILL_TOKENS
    assert budgets(controller).prefill_tokens(1, 512, max_slowdown=4.5) == 38
    assert budgets(controller).prefill_tokens(1, 512, max_slowdown=100.0) == 512
    assert budgets(controller).prefill_tokens(1, 10, max_slowdown=2.0) == 10
    # Half a millisecond for each of four contexts: the step may take 7 ms longer than without them.
    controller.cost_model.target.context_token_s, controller.cost_model.target.context_len = 1e-6, 500.0
    assert budgets(controller).prefill_tokens(1, 512, max_slowdown=4.5, num_running=4) == 45


def test_room_is_told_by_steps_with_prompts_and_what_is_allowed_by_those_without() -> None:
    controller = Controller(speculation_config())
    for rows in (1, 64, 512):
        for _ in range(5):
            seconds = 0.010 + 0.001 * rows
            controller.cost_model.target.add(rows, seconds, is_overlapped=False)
            controller.cost_model.target.add(rows, 1.5 * seconds, is_overlapped=False, has_prompt=True)
    # 4.5 times 11 ms are allowed: 23 rows at 15 ms and 1.5 ms a row.
    assert budgets(controller).prefill_tokens(1, 512, max_slowdown=4.5) == 22


def test_before_anything_is_measured_room_is_not_bounded() -> None:
    assert budgets(Controller(speculation_config())).prefill_tokens(1, 512, max_slowdown=2.0) == 512


def test_a_size_vouches_for_smaller_ones_that_were_disturbed_once() -> None:
    table = TimeTable()
    for size, seconds in ((1, 0.002), (23, 2.0), (40, 0.006), (160, 0.018)):
        table.add(size, seconds)
    assert table.largest_within(0.006) == 40
    assert table.largest_within(0.00905) == 70
    assert table.least(23) == 0.006
    assert table.largest_within(0.001) == 0


def test_one_disturbed_step_does_not_keep_larger_ones_from_being_tried() -> None:
    table = TimeTable()
    for size, seconds in ((33, 0.044), (33, 0.044), (33, 0.044), (36, 0.9), (66, 2.0)):
        table.add(size, seconds)
    # 96, the bucket of 66, at most 0.128 s; 36 at most 0.048. Half of the way between them.
    assert table.largest_within(0.0881) == 66
    assert table.largest_within(0.0494) == 37


def test_beyond_all_that_was_measured_sizes_grow_in_stages() -> None:
    table = TimeTable()
    table.add(8, 0.002)
    assert table.largest_within(0.1) == 32
    assert table.least(100) == 0.002


# ---- the router


def target_of(*, row_s: float = 0.001, prefix_cache: bool = False) -> FakeTarget:
    """10 ms a step and 1 ms a row."""
    return FakeTarget(MODEL, cost=lambda rows: int((0.010 + row_s * rows) * 1e9), prefix_cache=prefix_cache)


async def longest_gap(pair: Pair) -> float:
    """Of a running stream, while a long prompt arrives."""
    arrivals: list[float] = []

    async def listen() -> None:
        given = request("stream", PROMPT, max_tokens=120, speculation=PLAIN)
        async for _ in pair.router.stream(given):
            arrivals.append(pair.clock.monotonic())

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0.2)
    given = request("prompt", LONG, max_tokens=4, speculation=PLAIN)
    assert (await pair.router.complete(given)).token_ids == expected(given)
    await listening
    return max(later - earlier for earlier, later in pairwise(arrivals))


@pytest.mark.parametrize(("max_slowdown", "gap_s"), [(1000.0, 0.267), (3.0, 0.033)])
async def test_a_prompt_does_not_stall_a_running_stream(
    clock: VirtualClock, max_slowdown: float, gap_s: float
) -> None:
    """A step of one row takes 11 ms; 256 prompt tokens beside it take 256 more."""

    config = router_config(prefill_chunk_tokens=256, max_prefill_slowdown=max_slowdown, stream_interval_ms=0)
    async with serving(clock, target=target_of(), config=config) as pair:
        # Sizes are known: without that a first prompt is tried in stages, each at most four times larger.
        await pair.router.complete(request("first", LONG, max_tokens=4, speculation=PLAIN))
        longest = await longest_gap(pair)
        assert longest <= gap_s + 1e-3
        assert longest > 0.7 * gap_s


async def test_a_cached_prompt_takes_two_steps_whatever_its_length(clock: VirtualClock) -> None:
    target = target_of(prefix_cache=True)
    async with serving(clock, target=target, config=router_config(prefill_chunk_tokens=64)) as pair:
        steps = []
        for name in ("cold", "warm"):
            before = target.num_steps, target.num_rows
            given = request(name, LONG, max_tokens=1, speculation=PLAIN)
            output = await pair.router.complete(given)
            assert output.token_ids == expected(given)
            steps.append((target.num_steps - before[0], target.num_rows - before[1]))
            assert output.num_cached_tokens == (288 if name == "warm" else 0)
        # Five chunks; then 288 of 300 tokens are found, ten are computed with them and one draws.
        assert steps == [(5, 300), (2, 12)]


async def test_other_requests_with_a_common_beginning_find_it(clock: VirtualClock) -> None:
    target = target_of(prefix_cache=True)
    async with serving(clock, target=target, config=router_config(prefill_chunk_tokens=64)) as pair:
        for name, prompt in (("a", LONG), ("b", (*LONG[:200], 1, 2, 3)), ("c", LONG[:40])):
            given = request(name, prompt, max_tokens=6)
            output = await pair.router.complete(given)
            assert output.token_ids == expected(given)
            assert output.num_cached_tokens == {"a": 0, "b": 192, "c": 32}[name]


class RecordingTarget(FakeTarget):
    """Notes of every step how many prompts it filled in, and how many draft tokens it verified."""

    steps: list[tuple[int, int]]

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        num_prompts = sum(not item.sample for item in items)
        self.steps.append((num_prompts, sum(len(item.draft.token_ids) for item in items)))
        return super().verify(items)


@pytest.mark.parametrize(("num_prompts", "has_drafts"), [(1, True), (2, False)])
async def test_while_several_of_few_sessions_wait_for_their_prompts_the_others_do_not_speculate(
    clock: VirtualClock, num_prompts: int, has_drafts: bool
) -> None:
    target = RecordingTarget(MODEL, cost=lambda rows: int((0.010 + 0.001 * rows) * 1e9))
    target.steps = []
    config = router_config(prefill_chunk_tokens=32)
    # Right so often that speculation pays for two as well.
    draft = fake_draft(PerfectGuesser(MODEL))
    async with serving(clock, target=target, draft=draft, config=config) as pair:
        stream = asyncio.create_task(pair.router.complete(request("stream", PROMPT, max_tokens=120)))
        await asyncio.sleep(0.2)
        target.steps.clear()
        prompts = [request(f"prompt-{n}", LONG, max_tokens=2) for n in range(num_prompts)]
        outputs = await asyncio.gather(*(pair.router.complete(prompt) for prompt in prompts))
        assert [output.token_ids for output in outputs] == [expected(prompt) for prompt in prompts]
        assert (await stream).token_ids == expected(request("stream", PROMPT, max_tokens=120))
    # One prompt at a time is filled in here; while the first of two is, another waits.
    beside = [num_drafts for num_filled, num_drafts in target.steps if num_filled][1:8]
    assert len(beside) == 7
    assert (sum(beside) > 0) is has_drafts
    assert any(num_drafts for _, num_drafts in target.steps)


class SizingTarget(FakeTarget):
    """Notes the prompt tokens of every step that has some and runs beside a stream."""

    sizes: list[int]

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        self.sizes.append(sum(len(item.token_ids) for item in items if not item.sample))
        return super().verify(items)


@pytest.mark.parametrize(
    ("num_prompts", "stream_s", "size"),
    [(1, 0.2, MIN_PREFILL_TOKENS), (2, 0.2, 64), (2, 0.5, MIN_PREFILL_TOKENS)],
)
async def test_prompts_fill_their_steps_only_where_several_come_with_what_runs(
    clock: VirtualClock, num_prompts: int, stream_s: float, size: int
) -> None:
    """One that comes alone takes no more of a step than running ones allow, here nothing but the least.

    So do several where somebody has been reading for long.
    """

    target = SizingTarget(MODEL, cost=lambda rows: int((0.010 + 0.001 * rows) * 1e9))
    target.sizes = []
    config = router_config(prefill_chunk_tokens=64, max_prefill_slowdown=1.0)
    async with serving(clock, target=target, config=config) as pair:
        given = request("stream", PROMPT, max_tokens=120, speculation=PLAIN)
        stream = asyncio.create_task(pair.router.complete(given))
        await asyncio.sleep(stream_s)
        target.sizes.clear()
        prompts = [request(f"p-{n}", LONG, max_tokens=1, speculation=PLAIN) for n in range(num_prompts)]
        await asyncio.gather(*(pair.router.complete(prompt) for prompt in prompts))
        await stream
    filled = [tokens for tokens in target.sizes if tokens]
    assert filled[1:4] == [size] * 3


# ---- metrics


def test_grammar_counters_follow_the_engines() -> None:
    metrics = RouterMetrics()
    info = EngineInfo("target", "t", 64, "f", 16, 8, 64, 4, 64, 1)
    for stats in (GrammarStats(0.5, 1.5, 2, 3, 4), GrammarStats(0.75, 2.5, 3, 5, 9)):
        metrics.observe_engine("target", replace(info, grammar=stats))
    engine = [("engine", "target")]
    names = ("compile_seconds", "mask_seconds", "compiled", "cache_hits", "illegal_draft_tokens")
    shown = [metrics.value(f"specray_grammar_{name}_total", engine) for name in names]
    assert shown == [0.75, 2.5, 3, 5, 9]


def test_prefix_counters_go_on_when_an_engine_starts_anew() -> None:
    metrics = RouterMetrics()
    info = EngineInfo("target", "t", 64, "f", 16, 8, 64, 4, 64, 1, num_blocks_in_use=3)
    for queries, hits in ((100, 40), (150, 60), (20, 0), (20, 0)):
        metrics.observe_engine(
            "target", replace(info, num_prefix_cache_queries=queries, num_prefix_cache_hits=hits)
        )
    metrics.observe_engine("draft", None)
    engine = [("engine", "target")]
    assert metrics.value("specray_prefix_cache_queries_total", engine) == 170
    assert metrics.value("specray_prefix_cache_hits_total", engine) == 60
    assert metrics.value("specray_target_blocks_in_use") == 3
    metrics.observe_engine("target", None)
    assert metrics.value("specray_target_blocks_in_use") == 0
