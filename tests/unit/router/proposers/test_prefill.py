"""What the draft was not told goes to it in pieces: what stalls nobody, who is first, what may get lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from specray.control.controller import Controller
from specray.control.cost_model import CostModel, TargetTimes
from specray.control.state import Plan
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.fakes import FakeDraft, FakeTarget, LocalDrafter, PerfectGuesser, VirtualClock
from specray.requests import GenerateRequest
from specray.router.proposers.budgets import MIN_DRAFT_PREFILL_TOKENS, Budgets
from specray.router.proposers.prefill import DraftPrefill
from specray.router.session import Session
from specray.router.session_record import LiveSession
from specray.types import (
    DraftReplies,
    DraftReply,
    Proposal,
    SpeculateItem,
    StepTime,
    TargetReplies,
    Verdict,
    VerifyItem,
)
from tests.unit.router.harness import (
    DRAFT_STEP_S,
    MODEL,
    PROMPT,
    TARGET_S,
    Pair,
    expected,
    fake_draft,
    fake_target,
    request,
    router_config,
    run,
    serving,
    speculation_config,
)

LONG = tuple((7 * index) % 61 for index in range(300))
TOKEN_S = 0.0001
"""The draft reads 160 tokens in the time of a target step."""
SIZES = (1, 512)


def budgets(controller: Controller) -> Budgets:
    return Budgets(controller.cost_model, max_k=controller.max_k)


class RecordingDraft(FakeDraft):
    """Takes time for what it reads, and notes the items of every call."""

    def __init__(self, *, token_s: float = TOKEN_S) -> None:
        step_times = tuple(StepTime(size, DRAFT_STEP_S + token_s * (size - 1)) for size in SIZES)
        super().__init__(PerfectGuesser(MODEL), info=replace(fake_draft().info, step_times=step_times))
        self.token_s = token_s
        self.calls: list[tuple[SpeculateItem, ...]] = []
        self.unanswered = ""
        """A request whose next item is read and not answered."""

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        self.calls.append(tuple(items))
        replies = super().speculate(items).replies
        num_tokens = sum(len(item.token_ids) for item in items)
        steps = max(item.num_speculative_tokens + bool(item.fanout) for item in items)
        if any(item.request_id == self.unanswered for item in items):
            replies = tuple(reply for reply in replies if reply.request_id != self.unanswered)
            self.unanswered = ""
        return DraftReplies(replies, int(1e9 * (steps * DRAFT_STEP_S + self.token_s * num_tokens)))

    def told(self, request_id: str) -> list[tuple[int, int, bool]]:
        """Of its items: (base_len, tokens, is a piece)."""
        items = [item for call in self.calls for item in call if item.request_id == request_id]
        return [(item.base_len, len(item.token_ids), item.is_prefill_chunk) for item in items]

    @property
    def num_pieces(self) -> int:
        return sum(item.is_prefill_chunk for call in self.calls for item in call)


class RecordingTarget(FakeTarget):
    """20 ms a step; notes the draft tokens of every round of each request."""

    def __init__(self) -> None:
        step_times = tuple(StepTime(size, TARGET_S) for size in SIZES)
        info = replace(fake_target().info, step_times=step_times)
        super().__init__(MODEL, info=info, cost=lambda rows: int(TARGET_S * 1e9))
        self.num_drafts: dict[str, list[int]] = {}

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        for item in items:
            if item.sample:
                self.num_drafts.setdefault(item.request_id, []).append(len(item.draft.token_ids))
        return super().verify(items)


async def complete(pair: Pair, *given: GenerateRequest) -> None:
    """All at once; every output is the target's alone."""
    outputs = await asyncio.gather(*(pair.router.complete(each) for each in given))
    assert [output.token_ids for output in outputs] == [expected(each) for each in given]


async def until_piece(draft: RecordingDraft, number: int) -> None:
    """Until the draft was given so many pieces."""
    for _ in range(5000):
        if draft.num_pieces >= number:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"the draft was given {draft.num_pieces} pieces")


# ---- how much at once


@pytest.mark.parametrize(
    ("most", "step_s", "most_s", "room"),
    [
        (512, TARGET_S, 1.0, 160),
        (100, TARGET_S, 1.0, 100),
        (512, TARGET_S, 0.014, 96),
        (512, 0.001, 1.0, MIN_DRAFT_PREFILL_TOKENS),
        (16, 0.001, 1.0, 16),
        (512, None, 1.0, 512),
    ],
)
def test_room_is_what_is_read_in_a_target_step_and_in_patience_but_not_less_than_a_little(
    most: int, step_s: float | None, most_s: float, room: int
) -> None:
    measured = CostModel()
    measured.draft.expect({size: DRAFT_STEP_S + TOKEN_S * (size - 1) for size in SIZES})
    if step_s is not None:
        measured.target.add(1, step_s)
    room_of = Budgets(measured, max_k=7).draft_prefill_tokens
    assert room_of(most, num_rows=1, num_running=1, most_s=most_s) == room


def test_room_follows_the_target_step_of_those_who_run() -> None:
    controller = Controller(speculation_config())
    controller.cost_model.expect_draft(
        [StepTime(size, DRAFT_STEP_S + TOKEN_S * (size - 1)) for size in SIZES], 0.0
    )
    controller.cost_model.expect_target([StepTime(1, TARGET_S), StepTime(33, 2 * TARGET_S)], 0.0)
    rooms = [
        budgets(controller).draft_prefill_tokens(512, num_rows=rows, num_running=1, most_s=1.0)
        for rows in (1, 33)
    ]
    # In 40 ms 361, by size in whole blocks of rows.
    assert rooms == [160, 352]


def test_nothing_is_known_of_a_draft_so_that_nothing_bounds_what_it_reads() -> None:
    controller = Controller(speculation_config())
    controller.cost_model.expect_target([StepTime(1, TARGET_S)], 0.0)
    assert budgets(controller).draft_prefill_tokens(512, num_rows=1, num_running=1, most_s=1.0) == 512


# ---- pieces


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_alone_a_prompt_goes_in_whole_chunks_and_the_last_with_a_question(overlap: str) -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = RecordingDraft()
        config = router_config(prefill_chunk_tokens=128)
        async with serving(
            clock, draft=draft, config=config, overlap=overlap, num_speculative_tokens=3
        ) as pair:
            await complete(pair, request("a", LONG, max_tokens=12))
            assert draft.told("a")[:3] == [(0, 128, True), (128, 128, True), (256, 44, False)]
            assert draft.num_pieces == 2
            assert draft.calls[2][0].num_speculative_tokens == 3
            # What the draft said of the first token was found, and of every round after it.
            assert pair.counted("specray_spec_decode_num_accepted_tokens_total") >= 8
            await pair.settle()

    run(clock, main())


@pytest.mark.parametrize("overlap", ["serial", "ahead", "enumerate", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dies_after", [None, 2, 5])
@pytest.mark.parametrize("k", [3, "auto"])
def test_output_is_the_targets_alone_however_it_is_read(
    overlap: str, temperature: float, dies_after: int | None, k: int | str
) -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = RecordingDraft()
        async with serving(
            clock,
            draft=draft,
            make_drafter=lambda _: LocalDrafter(draft, clock, dies_after=dies_after),
            config=router_config(prefill_chunk_tokens=32),
            overlap=overlap,
            num_speculative_tokens=k,
        ) as pair:
            prompts = [PROMPT, LONG, LONG[:31], LONG[:33], LONG[100:]]
            given = [
                request(str(index), prompt, 40, temperature=temperature, seed=index)
                for index, prompt in enumerate(prompts)
            ]
            await complete(pair, *given)
            assert draft.num_pieces > 10
            assert (
                max(len(item.token_ids) for call in draft.calls for item in call) <= MIN_DRAFT_PREFILL_TOKENS
            )
            accepted = pair.counted("specray_spec_decode_num_accepted_tokens_total")
            assert accepted + pair.counted("specray_rounds_total") == 5 * 40
            if dies_after is None:
                assert accepted > 0
                await pair.settle()

    run(clock, main())


def test_nobody_waits_for_a_draft_that_is_still_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 s of reading; meanwhile the target goes on at one token a step."""
    clock = VirtualClock()

    async def main() -> None:
        draft = RecordingDraft(token_s=0.010)
        target = RecordingTarget()
        config = router_config(prefill_chunk_tokens=64)
        async with serving(
            clock, target=target, draft=draft, config=config, overlap="serial", num_speculative_tokens=3
        ) as pair:
            controller = pair.router._controller
            kinds: list[bool] = []
            observe = controller.cost_model.target.add

            def record(*args: Any, has_prompt: bool, **options: Any) -> None:
                kinds.append(has_prompt)
                observe(*args, has_prompt=has_prompt, **options)

            monkeypatch.setattr(TargetTimes, "add", lambda _, *args, **options: record(*args, **options))
            await complete(pair, request("a", LONG, max_tokens=30))
            # A step beside which the draft reads says nothing of others.
            assert kinds == [True] * 34
            # Five steps for the prompt, the last of which gives a token.
            assert clock.monotonic() == pytest.approx(TARGET_S * (5 + 29))
            assert target.num_drafts["a"] == [0] * 30
            assert pair.counted("specray_outcomes_total") == 0

    run(clock, main())


@pytest.mark.parametrize(
    ("overlap", "num_tokens", "round_s"),
    [("serial", 128, 0.029), ("enumerate", MIN_DRAFT_PREFILL_TOKENS, 0.021)],
)
def test_others_are_drafted_for_in_every_round_while_a_prompt_is_read(
    overlap: str, num_tokens: int, round_s: float
) -> None:
    """As one call the prompt would take the draft 0.2 s. Pieces fit beside the target's step of 20 ms.

    In turns, rounds take 8 ms more. Where both overlap, the draft works for 12 of the 20 ms anyway.
    """
    clock = VirtualClock()

    async def main() -> None:
        draft, target = RecordingDraft(), RecordingTarget()
        config = router_config(prefill_chunk_tokens=2048)
        async with serving(
            clock, target=target, draft=draft, config=config, overlap=overlap, num_speculative_tokens=2
        ) as pair:
            stream = asyncio.create_task(complete(pair, request("stream", PROMPT, max_tokens=200)))
            await asyncio.sleep(0.3)
            prompt = tuple(LONG * 10)[:2000]
            reading = asyncio.create_task(complete(pair, request("prompt", prompt, max_tokens=100)))
            await until_piece(draft, 1)
            begun, begun_s = len(target.num_drafts["stream"]), clock.monotonic()
            await until_piece(draft, 11)
            rounds = target.num_drafts["stream"][begun:]
            assert rounds == [2] * 10
            assert clock.monotonic() - begun_s <= 10 * round_s
            await asyncio.gather(stream, reading)
            # What was asked is answered before anything is read.
            assert all(len({item.is_prefill_chunk for item in call}) == 1 for call in draft.calls)
            pieces = [count for _, count, is_prefill_chunk in draft.told("prompt") if is_prefill_chunk]
            assert pieces[:11] == [num_tokens] * 11
            # It is drafted for as soon as the draft has read it.
            assert set(target.num_drafts["prompt"][-10:-2]) == {2}

    run(clock, main())


def test_what_is_left_when_a_piece_was_read_goes_with_the_next_question() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = RecordingDraft(token_s=TOKEN_S / 4)
        config = router_config(prefill_chunk_tokens=256)
        async with serving(
            clock, draft=draft, config=config, overlap="serial", num_speculative_tokens=3
        ) as pair:
            call = asyncio.create_task(complete(pair, request("a", LONG, max_tokens=60)))
            await asyncio.sleep(0.2)
            draft.forget("a")
            begun = len(draft.told("a"))
            await call
            told = draft.told("a")[begun:]
            first = next(index for index, (base_len, _, _) in enumerate(told) if base_len == 0)
            assert [(base_len, is_chunk) for base_len, _, is_chunk in told[first : first + 2]] == [
                (0, True),
                (256, False),
            ]

    run(clock, main())


# ---- several


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_a_burst_of_prompts_shares_what_is_read_at_once_and_the_first_comes_first(overlap: str) -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = RecordingDraft(token_s=TOKEN_S / 4)
        config = router_config(prefill_chunk_tokens=256)
        async with serving(
            clock, draft=draft, config=config, overlap=overlap, num_speculative_tokens=3
        ) as pair:
            await complete(pair, *(request(name, LONG, max_tokens=40) for name in "abc"))
            calls = [[(item.request_id, len(item.token_ids)) for item in call] for call in draft.calls]
            assert calls[:2] == [[("a", 256)], [("a", 44), ("b", 212)]]
            prompts = [
                sum(len(item.token_ids) for item in call if item.base_len < 300) for call in draft.calls
            ]
            assert max(prompts) == 256
            await pair.settle()

    run(clock, main())


def test_prompts_that_come_while_one_is_being_read_are_not_added_to_it() -> None:
    clock = VirtualClock()

    async def main() -> None:
        # A piece takes as long as twelve target steps.
        draft = RecordingDraft(token_s=0.001)
        config = router_config(prefill_chunk_tokens=256)
        async with serving(
            clock, draft=draft, config=config, overlap="enumerate", num_speculative_tokens=3
        ) as pair:
            first = asyncio.create_task(complete(pair, request("a", LONG, max_tokens=30)))
            await asyncio.sleep(0.050)
            second = asyncio.create_task(complete(pair, request("b", LONG, max_tokens=30)))
            await asyncio.sleep(0.200)
            assert draft.told("a") == [(0, 256, True)]
            assert draft.told("b") == []
            await until_piece(draft, 2)
            assert draft.told("b")[0][0] == 0
            await asyncio.gather(first, second)

    run(clock, main())


def test_many_short_prompts_at_once_are_no_long_call_either() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = RecordingDraft()
        config = router_config(prefill_chunk_tokens=64)
        async with serving(
            clock, draft=draft, config=config, overlap="serial", num_speculative_tokens=3
        ) as pair:
            given = [request(str(index), LONG[index : index + 20], max_tokens=30) for index in range(16)]
            await complete(pair, *given)
            prompts = [
                sum(len(item.token_ids) for item in call if item.base_len < 20) for call in draft.calls
            ]
            assert max(prompts) <= 64
            assert sum(base_len == 0 for one in given for base_len, _, _ in draft.told(one.request_id)) == 16

    run(clock, main())


# ---- the share of a session


def live(name: str, num_tokens: int, *, num_read: int = 0) -> LiveSession:
    """A session with its first token, of whose prompt the draft has read so much."""
    given = request(name, LONG[:num_tokens], max_tokens=100)
    session = Session(given, None, vocab_size=64)
    item = session.verify_item(1000)
    session.on_verdict(Verdict(name, item.round_id, 0, 0, 9))
    session.draft.synced_len = num_read
    stats = Controller(speculation_config()).start_session(given)
    stats.plan = Plan(3)
    return LiveSession(session, cast("Any", None), stats, 0.0, 100.0)


def test_a_session_has_the_target_compute_its_last_token_and_what_is_drafted_once() -> None:
    given = request("a", LONG[:5], max_tokens=100)
    session = Session(given, None, vocab_size=64)
    one = LiveSession(
        session, cast("Any", None), Controller(speculation_config()).start_session(given), 0.0, 100.0
    )
    assert one.num_rows == 5
    session.on_verdict(Verdict("a", session.verify_item(1000).round_id, 0, 0, 9))
    assert one.num_rows == 1
    session.take_draft(DraftTokens((1, 2, 3)))
    assert one.num_rows == 4
    session.on_verdict(Verdict("a", session.verify_item(1000).round_id, 5, 2, 9))
    # It tells the two accepted ones again.
    assert (session.num_missing, one.num_rows - one.num_drafted) == (3, 1)


def reading_of(*sessions: LiveSession, is_draft_idle: bool = False) -> DraftPrefill:
    """160 tokens fit into a step of the target; 256 are read at once at most."""
    controller = Controller(speculation_config())
    controller.cost_model.expect_draft(
        [StepTime(size, DRAFT_STEP_S + TOKEN_S * (size - 1)) for size in SIZES], 0.0
    )
    controller.cost_model.expect_target([StepTime(size, TARGET_S) for size in SIZES], 0.0)
    return DraftPrefill(
        {one.request_id: one for one in sessions},
        budgets(controller),
        max_tokens=256,
        patience_s=lambda: 1.0,
        is_draft_idle=lambda: is_draft_idle,
    )


def test_each_piece_without_an_answer_is_given_up_after_its_own_time() -> None:
    first, second, third = live("a", 300), live("b", 300), live("c", 300)
    reading = reading_of(first, second, third)
    for begun_s, one in ((1.0, first), (2.0, second), (2.5, third)):
        one.session.prefill_chunk_item(100)
        reading.note(one, begun_s)
    views = [one.session.draft for one in (first, second, third)]
    reading.expire(3.9, 3.0)
    assert [view.is_prefilling for view in views] == [True, True, True]
    reading.expire(4.0, 3.0)
    assert [view.is_prefilling for view in views] == [False, True, True]
    reading.expire(4.9, 3.0)
    assert [view.is_prefilling for view in views] == [False, True, True]
    # One that was answered meanwhile is nobody's loss.
    third.session.draft.in_flight = None
    reading.expire(5.0, 3.0)
    assert not any(view.is_prefilling for view in views)
    reading.expire(100.0, 3.0)
    assert not reading.is_going_on


def test_what_the_draft_is_reading_is_not_given_to_others() -> None:
    first, second = live("a", 300), live("b", 300)
    first.session.prefill_chunk_item(100)
    assert reading_of(first, second).share(second) == 156
    first.session.draft.lose()
    first.session.prefill_chunk_item(200)
    # 56 are left: it may as well wait for more.
    assert reading_of(first, second).share(second) == 0


def test_a_question_with_part_of_a_prompt_is_being_read_and_that_of_a_round_is_not() -> None:
    first, second = live("a", 50), live("b", 300)
    first.session.proposal_item(3)
    assert reading_of(first, second).share(second) == 256 - 51
    first.session.draft.lose()
    late = live("c", 300, num_read=201)
    late.session.proposal_item(3)
    assert reading_of(late, second).share(second) == 256 - 100
    first.session.draft.synced_len = 50
    first.session.proposal_item(3)
    assert reading_of(second, first, is_draft_idle=True).share(second) == 256


def test_prompts_that_go_before_everything_else_are_read_without_regard_for_others() -> None:
    company, reader = live("a", 5, num_read=5), live("b", 300)
    assert reading_of(company, reader).share(reader) == 160
    assert reading_of(company, reader, is_draft_idle=True).share(reader) == 256


@pytest.mark.parametrize(
    ("plan", "rest_rounds", "num_read"), [(None, 0, 5), (Plan(0), 0, 5), (Plan(3), 1, 5), (Plan(3), 0, 0)]
)
def test_who_is_not_drafted_for_is_no_company(plan: Plan | None, rest_rounds: int, num_read: int) -> None:
    other, reader = live("a", 5, num_read=num_read), live("b", 300)
    other.stats.plan, other.stats.rest_rounds = plan, rest_rounds
    assert reading_of(other, reader).share(reader) == 256


def test_in_company_each_step_of_the_target_has_its_share() -> None:
    company, reader = live("a", 5, num_read=5), live("b", 300)
    reading = reading_of(company, reader)
    for step, share in ((1, 160), (1, 0), (2, 160)):
        reading.begin()
        reading.begin_step(step)
        assert reading.share(reader) == share


def test_who_is_filled_in_by_the_target_is_no_company() -> None:
    other, reader = live("a", 5, num_read=5), live("b", 300)
    other.session.lose_target()
    assert reading_of(other, reader).share(reader) == 256


def test_questions_bring_what_there_is_room_for_and_in_company_a_little() -> None:
    company, reader, other = live("a", 5, num_read=5), live("b", 300, num_read=100), live("c", 60)
    alone = reading_of(reader, other)
    assert alone.can_ask(reader)
    # 201 and 61 tokens are more than 256.
    assert not alone.can_ask(other)
    alone.begin()
    assert alone.can_ask(other)
    reading = reading_of(company, reader, other)
    assert not reading.can_ask(live("d", 300, num_read=201))
    assert reading.can_ask(other)
    assert reading.can_ask(company)


def test_nobody_is_asked_before_it_has_read_its_piece() -> None:
    reader = live("a", 20)
    reader.session.prefill_chunk_item(21)
    assert not reading_of(reader).can_ask(reader)


@pytest.mark.parametrize(
    ("num_tokens", "num_read", "is_due"),
    [(20, 0, True), (300, 237, True), (20, 20, False), (300, 300, False)],
)
def test_prompts_are_read_and_what_a_round_brought_goes_with_its_question(
    num_tokens: int, num_read: int, is_due: bool
) -> None:
    one = live("a", num_tokens, num_read=num_read)
    assert reading_of(one).is_due(one) is is_due
    one.session.prefill_chunk_item(1)
    assert not reading_of(one).is_due(one)


# ---- losses


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_draft_lost_in_the_middle_of_reading_is_told_all_anew(overlap: str) -> None:
    clock = VirtualClock()

    async def main() -> None:
        drafts = [RecordingDraft(), RecordingDraft()]
        config = router_config(prefill_chunk_tokens=64)
        async with serving(
            clock,
            make_drafter=lambda number: LocalDrafter(
                drafts[number], clock, dies_after=2 if number == 0 else None
            ),
            config=config,
            overlap=overlap,
            num_speculative_tokens=3,
        ) as pair:
            await complete(pair, request("a", LONG, max_tokens=60))
            assert drafts[0].told("a") == [(0, 64, True), (64, 64, True)]
            told = drafts[1].told("a")
            assert told[:4] == [(0, 64, True), (64, 64, True), (128, 64, True), (192, 64, True)]
            assert pair.counted("specray_spec_decode_num_accepted_tokens_total") > 20

    run(clock, main())


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_sequence_evicted_in_the_middle_of_reading_is_told_anew(overlap: str) -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = RecordingDraft()
        config = router_config(prefill_chunk_tokens=64)
        async with serving(
            clock, draft=draft, config=config, overlap=overlap, num_speculative_tokens=3
        ) as pair:
            call = asyncio.create_task(complete(pair, request("a", LONG, max_tokens=60)))
            await until_piece(draft, 2)
            draft.forget("a")
            await call
            assert draft.told("a")[:5] == [
                (0, 64, True),
                (64, 64, True),
                (128, 64, True),
                (0, 64, True),
                (64, 64, True),
            ]
            assert pair.counted("specray_spec_decode_num_accepted_tokens_total") > 20

    run(clock, main())


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_piece_whose_answer_was_lost_is_read_again_when_a_draft_would_be_given_up(overlap: str) -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = RecordingDraft()
        config = router_config(prefill_chunk_tokens=128, round_timeout_s=0.3)
        async with serving(
            clock, draft=draft, config=config, overlap=overlap, num_speculative_tokens=3
        ) as pair:
            stream = asyncio.create_task(complete(pair, request("stream", PROMPT, max_tokens=400)))
            await asyncio.sleep(0.2)
            draft.unanswered = "a"
            given = asyncio.create_task(complete(pair, request("a", LONG, max_tokens=60)))
            await until_piece(draft, 1)
            begun_s = clock.monotonic()
            await until_piece(draft, 2)
            assert 0.3 <= clock.monotonic() - begun_s < 0.3 + 3 * TARGET_S
            assert [base_len for base_len, _, _ in draft.told("a")] == [0, 0]
            await asyncio.gather(stream, given)
            assert pair.counted("specray_draft_lost_total") == 0

    run(clock, main())


def test_session_that_ends_while_it_is_read_leaves_nothing_behind() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = RecordingDraft(token_s=0.001)
        config = router_config(prefill_chunk_tokens=256)
        async with serving(
            clock, draft=draft, config=config, overlap="serial", num_speculative_tokens=3
        ) as pair:
            await complete(pair, request("a", LONG, max_tokens=2))
            assert draft.told("a") == [(0, 256, True)]
            # Its answer comes late, and the next prompt is not kept waiting for it.
            await complete(pair, request("b", LONG, max_tokens=30))
            assert draft.told("b")[0] == (0, 256, True)
            assert pair.counted("specray_late_replies_total", engine="draft") == 1
            await pair.settle()

    run(clock, main())


def test_long_text_that_is_read_anew_beside_others_ends_with_a_piece_and_not_with_a_question() -> None:
    """All would wait for what the last piece brings."""
    clock = VirtualClock()

    async def main() -> None:
        draft = RecordingDraft()
        async with serving(clock, draft=draft, overlap="serial", num_speculative_tokens=3) as pair:
            stream = asyncio.create_task(complete(pair, request("stream", PROMPT, max_tokens=200)))
            call = asyncio.create_task(complete(pair, request("a", LONG[:200], max_tokens=60)))
            await asyncio.sleep(0.3)
            draft.forget("a")
            begun = len(draft.told("a"))
            await asyncio.gather(stream, call)
            told = draft.told("a")[begun:]
            first = next(index for index, (base_len, _, _) in enumerate(told) if base_len == 0)
            (_, begin, _), (_, rest, is_prefill_chunk), (_, asked, is_other_piece) = told[first : first + 3]
            assert (begin, is_prefill_chunk, is_other_piece) == (128, True, False)
            assert rest > MIN_DRAFT_PREFILL_TOKENS
            assert asked <= 4

    run(clock, main())


# ---- what is learnt


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


def test_steps_that_also_worked_for_sessions_which_have_ended_are_not_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = VirtualClock()
    learnt: list[list[tuple[str, int]]] = []

    observe = CostModel.observe_draft_step

    def record(self: CostModel, answered: list[tuple[SpeculateItem, DraftReply]], *times: float) -> None:
        learnt.append([(item.request_id, item.base_len) for item, _ in answered])
        observe(self, answered, *times)

    async def main() -> None:
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

    run(clock, main())


def test_a_try_of_speculation_begins_when_the_draft_has_read_the_text() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = RecordingDraft(token_s=0.001)
        config = router_config(prefill_chunk_tokens=64)
        async with serving(
            clock, draft=draft, config=config, overlap="serial", num_speculative_tokens=3
        ) as pair:
            call = asyncio.create_task(complete(pair, request("a", LONG, max_tokens=200)))
            await until_piece(draft, 2)
            stats = pair.router._sessions.running["a"].stats
            # One of them is under way already.
            stats.is_exploring, stats.rounds_to_replan = True, 3
            await until_piece(draft, 4)
            await asyncio.sleep(4 * TARGET_S)
            assert stats.is_exploring and stats.rounds_to_replan in (2, 3)
            await call
            assert not stats.is_exploring

    run(clock, main())
