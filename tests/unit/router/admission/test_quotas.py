"""Limits of a key hold at the router, whichever ingress its requests came through."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specray.config import AuthConfig, KeyConfig
from specray.errors import DeadlineExceededError, OverloadedError
from specray.fakes import VirtualClock
from specray.requests import GenerateRequest, Quota
from specray.router.admission.quotas import Quotas
from specray.serving.admission.api_keys import Caller, Keyring
from tests.unit.router.harness import fake_target, request, serving

TWO = Quota("team", max_requests=2)


def of_key(request_id: str, quota: Quota | None = TWO, num_tokens: int = 5) -> GenerateRequest:
    return replace(request(request_id, prompt=(1,) * num_tokens, max_tokens=20), quota=quota)


async def test_requests_of_a_key_are_bounded_until_they_end_however_they_end(clock: VirtualClock) -> None:
    async with serving(clock, target=fake_target(max_num_seqs=1)) as pair:
        calls = [asyncio.create_task(pair.router.complete(of_key(str(index)))) for index in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as caught:
            await pair.router.complete(of_key("third"))
        assert str(caught.value) == "key 'team' has 2 requests in hand; allowed: 2"
        assert pair.counted("specray_requests_refused_total") == 1
        await pair.router.complete(of_key("of another", Quota("other", max_requests=1)))
        await asyncio.gather(*calls)
        stream = pair.router.stream(of_key("left by its caller"))
        await anext(stream)
        await stream.aclose()
        with pytest.raises(DeadlineExceededError):
            await pair.router.complete(replace(of_key("late"), timeout_s=0.05))
        # Nothing is held of the key any more: two at a time are let in again.
        await asyncio.gather(*(pair.router.complete(of_key(f"again {index}")) for index in range(2)))
        await pair.settle()


async def test_prompt_tokens_of_a_key_are_bounded_while_they_wait(clock: VirtualClock) -> None:
    quota = Quota("team", max_queued_tokens=100)

    async with serving(clock, target=fake_target(max_num_seqs=1)) as pair:
        calls = []
        for name, num_tokens in (("runs", 60), ("waits", 60), ("waits too", 40)):
            calls.append(asyncio.create_task(pair.router.complete(of_key(name, quota, num_tokens))))
            await asyncio.sleep(0.001)
        with pytest.raises(OverloadedError, match="100 prompt tokens waiting; allowed: 100"):
            await pair.router.complete(of_key("one more", quota, 1))
        await asyncio.gather(*calls)
        # One alone is let in, however long.
        await pair.router.complete(of_key("alone", quota, 150))
        await pair.settle()


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9), st.booleans()), max_size=30))
def test_nothing_is_left_when_all_have_ended(steps: list[tuple[str, int, bool]]) -> None:
    quotas = Quotas()
    taken = []
    for index, (name, num_tokens, is_let_in) in enumerate(steps):
        one = of_key(str(index), Quota(name, max_requests=5, max_queued_tokens=20), num_tokens)
        try:
            quotas.check(one)
        except OverloadedError:
            continue
        quotas.take(one)
        if is_let_in:
            quotas.let_in(one)
        taken.append((one, is_let_in))
    assert len(taken) <= 10
    for one, is_let_in in taken:
        quotas.release(one, was_let_in=is_let_in)
    assert len(quotas) == 0


def test_requests_carry_the_limits_of_their_key_and_nothing_without() -> None:
    limited = KeyConfig.model_validate({"name": "team", "sha256": "a" * 64, "max_requests": 2})
    free = KeyConfig.model_validate({"name": "free", "sha256": "b" * 64})
    assert Keyring(AuthConfig(keys=(limited, free))).asks_for_key
    claimed = of_key("r", Quota("somebody", max_requests=1000))
    assert [Caller(key).apply_policy([claimed])[0].quota for key in (limited, free)] == [TWO, None]
