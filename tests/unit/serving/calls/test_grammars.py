"""Refused grammars: how long their answers are held back, and that nobody waits for the work on them."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from specray.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from specray.grammar import PreparedCompiler
from specray.grammar.compiler import MAX_SOURCE_LEN
from specray.serving.admission.fair_pool import Turn
from specray.serving.calls.grammars import MAX_HOLD_S, GrammarChecker, RefusalPace
from specray.serving.validation import Limits
from specray.types import Grammar, GrammarKind
from tests.unit.serving.http.service import TOKENIZER, wait_until

LIMITS = Limits("m", TOKENIZER.vocab_size, 64, tuple(TOKENIZER.eos_token_ids))
WRONG = Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}')
RIGHT = Grammar(GrammarKind.REGEX, "a+")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_refusal_now_and_then_is_not_held_and_one_after_the_other_is() -> None:
    clock = Clock()
    pace = RefusalPace(monotonic=clock)
    # 5 ms for each call are 100 ms of a twentieth.
    assert pace.hold_s(0.0) == 0.0
    assert pace.hold_s(0.0) == pytest.approx(0.1)
    clock.now_s += 0.15
    assert pace.hold_s(0.005) == pytest.approx(0.05)
    clock.now_s += 0.25
    assert pace.hold_s(0.0) == 0.0


def test_a_hold_has_an_end_and_a_flood_is_forgotten() -> None:
    clock = Clock()
    pace = RefusalPace(monotonic=clock)
    assert [pace.hold_s(1.0) for _ in range(5)] == [0.0] + 4 * [MAX_HOLD_S]
    clock.now_s += 2.0
    assert pace.hold_s(0.0) == 0.0


class ShownPace(RefusalPace):
    """A pace that tells what it is asked, and holds back for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def hold_s(self, work_s: float) -> float:
        self.asked.append(work_s)
        return 3600.0


async def test_only_what_is_refused_is_held_back() -> None:
    pace = ShownPace()
    checker = GrammarChecker(PreparedCompiler.of(TOKENIZER), lambda: pace)
    await checker.check(RIGHT, field="f", limits=LIMITS)
    assert await checker.read(lambda: 7, field="f") == 7
    assert pace.asked == []
    held = asyncio.create_task(checker.check(WRONG, field="f", limits=LIMITS))
    await wait_until(lambda: len(pace.asked) == 1)
    assert pace.asked[0] > 0
    # Who is held back keeps nobody from having another grammar checked.
    async with asyncio.timeout(20):
        await checker.check(RIGHT, field="f", limits=LIMITS)
    assert not held.done()
    held.cancel()


async def test_reading_runs_off_the_event_loop_and_its_refusal_is_held_back() -> None:
    pace = RefusalPace(monotonic=Clock())
    checker = GrammarChecker(PreparedCompiler.of(TOKENIZER), lambda: pace)
    threads: list[int] = []

    def read() -> None:
        threads.append(threading.get_ident())
        raise InvalidRequestError("no", field="f")

    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="no"):
            await checker.read(read, field="f")
    started_s = time.monotonic()
    with pytest.raises(InvalidRequestError):
        await checker.read(read, field="f")
    assert time.monotonic() - started_s > 0.05
    assert threading.get_ident() not in threads


async def test_a_grammar_that_is_too_long_is_refused_and_not_kept() -> None:
    prepared = PreparedCompiler.of(TOKENIZER)
    checker = GrammarChecker(prepared)
    long = Grammar(GrammarKind.REGEX, "a" * (MAX_SOURCE_LEN + 1))
    with pytest.raises(
        InvalidRequestError,
        match=f"it has {MAX_SOURCE_LEN + 1} characters; allowed: at most {MAX_SOURCE_LEN}",
    ):
        await checker.check(long, field="f", limits=LIMITS)
    assert prepared.made is not None and not prepared.made.holds(long)


class Slow:
    """Work that goes on until it may end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_begun = 0
        self.num_ended = 0

    def __call__(self) -> int:
        self.num_begun += 1
        assert self.may_end.wait(20)
        self.num_ended += 1
        return self.num_ended


async def begun(slow: Slow, number: int) -> None:
    await wait_until(lambda: slow.num_begun >= number)


async def test_who_gives_up_leaves_the_turns_as_they_are() -> None:
    """The work of a caller that left goes on alone, and what waited with it is never done."""
    checker, slow = GrammarChecker(PreparedCompiler.of(TOKENIZER)), Slow()
    calls = [asyncio.create_task(checker.read(slow, field="f")) for _ in range(3)]
    await begun(slow, 1)
    calls[0].cancel()
    calls[1].cancel()
    await asyncio.wait(calls[:2])
    await asyncio.sleep(0.02)
    assert slow.num_begun == 1
    slow.may_end.set()
    assert await calls[2] == 2
    assert slow.num_begun == 2


async def test_no_answer_blames_a_grammar_for_the_time_of_others() -> None:
    checker, slow = GrammarChecker(PreparedCompiler.of(TOKENIZER), max_wait_s=0.2), Slow()
    first = asyncio.create_task(checker.read(slow, field="f"))
    await begun(slow, 1)
    with pytest.raises(OverloadedError, match=r"the call waited 0\.2 s for the grammars of others"):
        await checker.read(slow, field="f")
    with pytest.raises(OverloadedError, match=r"the call waited 0\.2 s for the grammars of others"):
        await checker.check(RIGHT, field="f", limits=LIMITS)
    slow.may_end.set()
    assert await first == 1


async def test_the_callers_deadline_holds_in_line_and_at_work() -> None:
    checker, slow = GrammarChecker(PreparedCompiler.of(TOKENIZER)), Slow()
    soon = Turn("a", asyncio.get_running_loop().time() + 0.1)
    with pytest.raises(DeadlineExceededError, match="during work on the call's grammars"):
        await checker.read(slow, field="f", turn=soon)
    with pytest.raises(DeadlineExceededError, match="while the call waited for grammars"):
        await checker.check(RIGHT, field="f", limits=LIMITS, turn=soon)
    slow.may_end.set()


async def test_a_tenant_waits_for_one_grammar_of_each_other_tenant() -> None:
    checker, slow = GrammarChecker(PreparedCompiler.of(TOKENIZER)), Slow()
    many = [asyncio.create_task(checker.read(slow, field="f", turn=Turn("a"))) for _ in range(20)]
    await begun(slow, 1)
    other = asyncio.create_task(checker.read(lambda: slow.num_ended, field="f", turn=Turn("b")))
    await asyncio.sleep(0)
    slow.may_end.set()
    assert await other <= 2
    await asyncio.gather(*many)


async def test_refusals_of_one_tenant_hold_back_no_other() -> None:
    checker = GrammarChecker(PreparedCompiler.of(TOKENIZER))
    for _ in range(3):
        with pytest.raises(InvalidRequestError):
            await checker.check(WRONG, field="f", limits=LIMITS, turn=Turn("a"))
    assert checker.pace_of("a") is not checker.pace_of("b")
    assert checker.pace_of("b").hold_s(0.0) == 0.0


async def test_what_is_known_waits_for_nobody() -> None:
    checker, slow = GrammarChecker(PreparedCompiler.of(TOKENIZER)), Slow()
    await checker.check(RIGHT, field="f", limits=LIMITS)
    busy = asyncio.create_task(checker.read(slow, field="f"))
    await begun(slow, 1)
    await checker.check(RIGHT, field="f", limits=LIMITS)
    assert not busy.done()
    slow.may_end.set()
    await busy


async def test_other_mistakes_of_a_request_with_a_grammar_are_not_held() -> None:
    pace = ShownPace()
    checker = GrammarChecker(PreparedCompiler.of(TOKENIZER), lambda: pace)

    def read() -> None:
        raise InvalidRequestError("no", field="stop[0]")

    with pytest.raises(InvalidRequestError, match="no"):
        await checker.read(read, field="response_format")
    assert pace.asked == []
