"""Places of calls: what a slow body holds, whom it keeps out, and until when it is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from specray.config import KeyConfig
from specray.errors import DeadlineExceededError, OverloadedError
from specray.serving.admission import places as module
from specray.serving.admission.api_keys import Caller
from specray.serving.admission.places import Place, Places


def key(name: str, **limits: int) -> Caller:
    return Caller(KeyConfig(name=name, sha256="0" * 64, **limits))


def make(max_calls: int = 4, *, timeout_s: float = 60.0, max_held_bytes: int = 1000) -> Places:
    return Places(max_calls, timeout_s=timeout_s, max_held_bytes=max_held_bytes)


async def waiting(place: Place) -> asyncio.Task[None]:
    """A call whose body has stopped to come."""

    async def never() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(place.receive(never()))
    await asyncio.sleep(0)
    return task


async def at_once() -> str:
    return "part"


async def test_bodies_of_one_key_that_never_come_keep_nobody_out() -> None:
    places, slow, other = make(4), key("slow"), key("other")
    tasks = [await waiting(places.arrive(slow)) for _ in range(4)]
    first = places.arrive(other)
    assert (places.num_arriving, places.num_calls) == (4, 0)
    with pytest.raises(OverloadedError, match="the body came too slowly: others have taken its room"):
        await tasks[0]
    assert not any(task.done() for task in tasks[1:])
    assert await first.receive(at_once()) == "part"
    first.begin()
    assert (places.num_arriving, places.num_calls) == (3, 1)
    for task in tasks:
        task.cancel()


async def test_the_key_with_most_bodies_gives_room_also_for_its_own_next_one() -> None:
    places, many, few = make(3), key("many"), key("few")
    kept = await waiting(places.arrive(few))
    first, second = [await waiting(places.arrive(many)) for _ in range(2)]
    for victim in (first, second):
        await waiting(places.arrive(many))
        with pytest.raises(OverloadedError):
            await victim
    assert not kept.done() and places.num_arriving == 3


async def test_bodies_of_all_calls_together_are_bounded() -> None:
    places, large, small = make(max_held_bytes=1000), key("large"), key("small")
    first, second, third = places.arrive(large), places.arrive(large), places.arrive(small)
    task = await waiting(first)
    first.hold(400)
    second.hold(500)
    third.hold(100)
    third.hold(100)  # 1100 bytes are more than 1000: the oldest of the key that has most goes.
    with pytest.raises(OverloadedError):
        await task
    first.leave()
    assert third.num_bytes == 200 and not third.is_displaced
    # What is tokenized already is held too, and is not taken back: the body that comes has to go.
    second.begin()
    with pytest.raises(OverloadedError):
        third.hold(400)
    second.release_body()
    places.arrive(small).hold(1000)


async def test_a_key_has_its_requests_from_the_first_byte_on() -> None:
    places, caller = make(), key("a", max_requests=1)
    with places.arrive(caller), pytest.raises(OverloadedError, match="1 requests in hand; allowed: 1"):
        places.arrive(caller)
    with places.arrive(caller) as again:
        again.begin()
    assert (caller.num_requests, places.num_calls, places.num_arriving) == (0, 0, 0)


async def test_calls_that_are_answered_are_bounded_before_and_behind_their_bodies() -> None:
    places, caller = make(1), key("a")
    late = places.arrive(caller)
    with places.arrive(key("b")) as answered:  # It takes the room of the other body, not its call.
        answered.begin()
        with pytest.raises(OverloadedError, match="1 calls are in hand; allowed: 1"):
            places.arrive(caller)
        with pytest.raises(OverloadedError, match="1 calls are in hand; allowed: 1"):
            late.begin()
        late.leave()
        late.leave()
    assert (caller.num_requests, places.num_calls, places.num_arriving) == (0, 0, 0)


@pytest.mark.parametrize(
    ("num_bytes", "within_s"),
    [(0, 10.0), (1024, 11.0), (20 * 1024, 30.0), (100 * 1024, 60.0)],
)
async def test_a_body_has_time_by_what_has_come(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, within_s: float
) -> None:
    ends: list[float] = []

    def timeout_at(end_s: float) -> asyncio.Timeout:
        ends.append(end_s)
        return asyncio.timeout_at(end_s)

    place = make(timeout_s=600, max_held_bytes=1 << 20).arrive(key("a"))
    place.hold(num_bytes)
    monkeypatch.setattr(module, "asyncio", _Asyncio(timeout_at))
    began_s = asyncio.get_running_loop().time()
    assert await place.receive(at_once()) == "part"
    assert ends[0] - began_s == pytest.approx(within_s, abs=0.5)


class _Asyncio:
    """The module, with another ``timeout_at``."""

    def __init__(self, timeout_at: object) -> None:
        self.timeout_at = timeout_at

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)


async def test_the_time_of_a_call_runs_from_its_first_byte() -> None:
    now_s = asyncio.get_running_loop().time()
    place = make().arrive(key("a"), arrived_s=now_s - 5.0)
    assert place.remaining_s == pytest.approx(55.0, abs=1.0)
    place.limit(7.0)
    place.limit(70.0)
    assert place.remaining_s == pytest.approx(2.0, abs=1.0)
    assert place.turn.deadline_s == now_s + 2.0
    place.limit(4.5)
    for waits in (place.receive(asyncio.sleep(20)), _in_time(place)):
        with pytest.raises(DeadlineExceededError, match=r"not answered within 4\.5 s of its first byte"):
            await waits
    with pytest.raises(DeadlineExceededError):
        _ = place.remaining_s


async def _in_time(place: Place) -> None:
    async with place.in_time():
        await asyncio.sleep(20)


async def test_a_body_that_stops_to_come_is_a_time_out_of_its_own() -> None:
    place = make().arrive(key("a"))
    part: Awaitable[None] = asyncio.sleep(20)
    with pytest.raises(TimeoutError):
        await place.receive(part, grace_s=0.01)


async def test_a_timeout_of_the_work_itself_is_no_deadline() -> None:
    place = make().arrive(key("a"))
    with pytest.raises(TimeoutError, match="its own"):
        async with place.in_time():
            raise TimeoutError("its own")
