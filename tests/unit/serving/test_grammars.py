"""Refused grammars: how long their answers are held back, and that nobody waits for the work on them."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from specray.errors import InvalidRequestError
from specray.grammar.compiler import MAX_SOURCE_LEN
from specray.serving.grammars import MAX_HOLD_S, GrammarChecker, RefusalPace
from specray.serving.validation import Limits
from specray.types import Grammar, GrammarKind
from tests.unit.serving.http.service import TOKENIZER

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
    checker = GrammarChecker(TOKENIZER, pace)
    await checker.check(RIGHT, field="f", limits=LIMITS)
    assert await checker.read(lambda: 7, field="f") == 7
    assert pace.asked == []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await checker.check(WRONG, field="f", limits=LIMITS)
    (work_s,) = pace.asked
    assert 0 < work_s < 0.3
    # Who is held back keeps nobody from having another grammar checked.
    held = asyncio.create_task(checker.check(WRONG, field="f", limits=LIMITS))
    async with asyncio.timeout(5):
        while len(pace.asked) < 2:  # noqa: ASYNC110  # A pace has no event.
            await asyncio.sleep(0.001)
    async with asyncio.timeout(1):
        await checker.check(RIGHT, field="f", limits=LIMITS)
    held.cancel()


async def test_reading_runs_off_the_event_loop_and_its_refusal_is_held_back() -> None:
    pace = RefusalPace()
    checker = GrammarChecker(TOKENIZER, pace)
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
    checker = GrammarChecker(TOKENIZER)
    long = Grammar(GrammarKind.REGEX, "a" * (MAX_SOURCE_LEN + 1))
    with pytest.raises(InvalidRequestError, match="it has 65537 characters; allowed: at most 65536"):
        await checker.check(long, field="f", limits=LIMITS)
    assert checker._compiler is not None and not checker._compiler._kept
