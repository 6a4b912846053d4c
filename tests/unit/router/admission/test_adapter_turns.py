"""Who has room in a target for an adapter, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from specray.config.adapters import AdaptersConfig
from specray.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from specray.fakes import VirtualClock
from specray.router.scheduler import of_few_adapters
from specray.types import VerifyItem
from tests.unit.router.admission.adapted import CONFIG, NAMES, asking, digest_of, new_target, outputs
from tests.unit.router.harness import TARGET_S, expected, serving


async def test_others_are_not_kept_waiting_and_each_adapter_has_its_turn(clock: VirtualClock) -> None:
    """One adapter's requests come without end; another waits for room, and gets it."""
    target = new_target(max_adapters=1, max_per_step=1)
    config = AdaptersConfig(directory="/adapters", max_loaded=1, max_per_step=1)
    async with serving(clock, target=target, adapters=config) as pair:
        ended: list[str] = []

        async def stream_of(name: str, number: int) -> None:
            for turn in range(number):
                one = asking(name, f"{name}-{turn}", max_tokens=8)
                assert (await pair.router.complete(one)).token_ids == expected(one)
                ended.append(one.request_id)

        async def base() -> None:
            assert (await pair.router.complete(asking("", max_tokens=2))).finish_reason is not None
            ended.append("base")

        busy = [asyncio.create_task(stream_of(f"{name}", 12)) for name in ("sql", "sql")[:1]]
        await asyncio.sleep(3 * TARGET_S)
        other = asyncio.create_task(stream_of("chat", 1))
        await asyncio.sleep(TARGET_S)
        await asyncio.gather(base(), other, *busy)
        # The base waits for no adapter; chat waits for one output of sql, not for all twelve.
        assert ended.index("base") < ended.index("chat-0") <= 3
        await pair.settle()


async def test_a_step_has_few_adapters_and_all_take_turns(clock: VirtualClock) -> None:
    target = new_target(max_adapters=4)
    steps: list[set[str]] = []
    verify = target.verify

    def watched(items: Sequence[VerifyItem]) -> Any:
        steps.append({item.request_id.rstrip("01") for item in items})
        return verify(items)

    target.verify = watched  # type: ignore[method-assign]
    given = [asking(name, f"{name}{number}", max_tokens=12) for name in NAMES[:4] for number in range(2)]
    given += [asking("", "base", max_tokens=12)]
    async with serving(clock, target=target, adapters=CONFIG, has_draft_model=False) as pair:
        assert await outputs(pair, given) == [expected(each) for each in given]
    full = [step for step in steps if len(step - {"base"}) == 2]
    assert max(len(step - {"base"}) for step in steps) == 2
    # With four adapters and two in a step, nobody misses two steps in a row while all run.
    for name in NAMES[:4]:
        assert all(name in first | second for first, second in pairwise(full[2:-2]))


def test_the_adapters_longest_without_a_step_go_first_and_bring_all_their_sessions() -> None:
    class Session:
        def __init__(self, adapter: bytes, last_step: int) -> None:
            self.adapter, self.last_step = adapter, last_step

    a, b, c = b"a", b"b", b"c"
    ready: list[Any] = [
        Session(a, 7),
        Session(b"", 7),
        Session(b, 5),
        Session(a, 3),
        Session(c, 4),
        Session(c, 6),
    ]
    assert of_few_adapters(ready, 3) == ready
    assert of_few_adapters(ready, 2) == [ready[0], ready[1], *ready[3:]]
    assert of_few_adapters(ready, 1) == [ready[0], ready[1], ready[3]]


async def test_pinned_adapters_stay_and_who_finds_no_room_ends_by_its_deadline(clock: VirtualClock) -> None:
    target = new_target(max_adapters=1)
    async with serving(clock, target=target, adapters=CONFIG) as pair:
        await pair.router.load_adapter("sql", is_pinned=True)
        with pytest.raises(DeadlineExceededError):
            await pair.router.complete(replace(asking("chat"), timeout_s=2.0))
        with pytest.raises(OverloadedError, match="1 adapters are loaded, all in use or pinned"):
            await pair.router.load_adapter("chat")
        given = asking("sql")
        assert await outputs(pair, [given]) == [expected(given)]
        await pair.router.unload_adapter(digest_of("sql"))
        given = asking("chat", "again")
        assert await outputs(pair, [given]) == [expected(given)]


async def test_who_waits_for_an_adapter_can_go_away(clock: VirtualClock) -> None:
    target = new_target(max_adapters=1)
    async with serving(clock, target=target, adapters=CONFIG) as pair:
        long = asking("sql", max_tokens=60)
        running = asyncio.create_task(pair.router.complete(long))
        await asyncio.sleep(5 * TARGET_S)
        waiting = asyncio.create_task(pair.router.complete(asking("chat")))
        await asyncio.sleep(5 * TARGET_S)
        waiting.cancel()
        await asyncio.sleep(5 * TARGET_S)
        # Nobody needs the place any more: those of the same adapter are let in again.
        other = asking("sql", "other", max_tokens=4)
        assert await outputs(pair, [other]) == [expected(other)]
        assert not running.done()
        assert (await running).token_ids == expected(long)
        await pair.settle()


@pytest.mark.parametrize("wanted", ["by a request", "by a command", "by a command that goes away"])
async def test_the_closed_adapter_lets_in_again_when_what_wanted_its_place_cannot_be_loaded(
    clock: VirtualClock, wanted: str
) -> None:
    target = new_target(max_adapters=2)
    async with serving(clock, target=target, adapters=CONFIG) as pair:
        long, short = asking("sql", max_tokens=60), asking("chat", max_tokens=12)
        running = [asyncio.create_task(pair.router.complete(each)) for each in (long, short)]
        await asyncio.sleep(5 * TARGET_S)
        is_asked = wanted == "by a request"
        other: Any = pair.router.complete(asking("no")) if is_asked else pair.router.load_adapter("no")
        other = asyncio.create_task(other)
        await asyncio.sleep(3 * TARGET_S)
        if wanted == "by a command that goes away":
            other.cancel()
        # It came while sql was closed, and sql's place was not the one that became free.
        late = asyncio.create_task(pair.router.complete(asking("sql", "late")))
        assert isinstance(
            (await asyncio.gather(other, return_exceptions=True))[0], Exception | asyncio.CancelledError
        )
        assert (await late).token_ids == expected(asking("sql", "late"))
        assert not running[0].done()
        assert [(await each).token_ids for each in running] == [expected(long), expected(short)]


async def test_a_folder_that_was_put_right_is_read_again_while_others_wait_for_room(
    clock: VirtualClock,
) -> None:
    target = new_target(max_adapters=1)
    async with serving(clock, target=target, adapters=CONFIG) as pair:
        wrong = asyncio.create_task(pair.router.complete(asking("no")))
        await asyncio.sleep(0)
        given = [asking("sql", max_tokens=30), asking("chat")]
        tasks = [asyncio.create_task(pair.router.complete(each)) for each in given]
        with pytest.raises(InvalidRequestError, match="'no' cannot be loaded"):
            await wrong
        await asyncio.sleep(3 * TARGET_S)
        assert not any(each.done() for each in tasks)
        target.folders["no"] = digest_of("no")
        again = asking("no", "again")
        assert await outputs(pair, [again]) == [expected(again)]
        assert [(await each).token_ids for each in tasks] == [expected(each) for each in given]
