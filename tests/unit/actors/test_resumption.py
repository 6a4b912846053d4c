"""Resumption: when a router is lost in the middle of an output, another continues it seamlessly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specray.actors.router import RouterReplica
from specray.config import parse_config
from specray.errors import EngineLostError, InvalidRequestError
from specray.fakes import VirtualClock
from specray.requests import FinishReason, GenerateRequest, OutputChunk, Quota, Resumption
from specray.router.session.session import Session
from tests.unit.router.harness import (
    MODEL,
    TARGET_S,
    Pair,
    begin,
    expected,
    fake_target,
    of_tenant,
    request,
    router_config,
    run,
    serving,
)

GIVEN = request(max_tokens=12, temperature=1.0, seed=5)


def resumed(given: GenerateRequest, num_tokens: int, *, request_id: str = "b") -> GenerateRequest:
    """The request as a second router gets it, after ``num_tokens`` output tokens of the first."""
    done = Resumption(expected(given)[:num_tokens], "checkpoint")
    return replace(given, request_id=request_id, resumed=done)


def answer(given: GenerateRequest, **options: Any) -> tuple[OutputChunk, Pair]:
    """Answer of a separate router, and the pair it ran on."""
    clock = VirtualClock()

    async def main() -> tuple[OutputChunk, Pair]:
        async with serving(clock, **options) as pair:
            output = await pair.router.complete(given)
            await pair.settle()
            return output, pair

    return run(clock, main())


@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_output_goes_on_wherever_it_was_cut_with_the_same_tokens(num_tokens: int) -> None:
    output, _ = answer(resumed(GIVEN, num_tokens))
    assert output.token_ids == expected(GIVEN)[num_tokens:]
    assert output.finish_reason is FinishReason.LENGTH


def test_penalties_and_noise_know_where_the_prompt_ended() -> None:
    clock = VirtualClock()
    target = fake_target()
    told = []
    verify = target.verify
    target.verify = lambda items: (told.extend(items), verify(items))[1]  # type: ignore[method-assign]

    async def main() -> None:
        async with serving(clock, target=target) as pair:
            await pair.router.complete(resumed(GIVEN, 7))

    run(clock, main())
    assert told[0].token_ids == GIVEN.prompt_token_ids + expected(GIVEN)[:7]
    assert told[0].sampling is not None and told[0].sampling.num_prompt_tokens == len(GIVEN.prompt_token_ids)


class Ends:
    """Matcher of a stop string of three tokens."""

    def __init__(self, stop: Sequence[int]) -> None:
        self._stop, self._seen = list(stop), list[int]()

    def push(self, token_ids: Sequence[int]) -> str | None:
        self._seen.extend(token_ids)
        return "END" if self._seen[-len(self._stop) :] == self._stop else None


@pytest.mark.parametrize("num_tokens", [3, 4, 5])
def test_stop_string_that_was_begun_before_the_cut_ends_the_output(num_tokens: int) -> None:
    given = replace(GIVEN, stop=("END",))
    stop = expected(given)[3:6]
    output, _ = answer(resumed(given, num_tokens), stop_matchers=lambda strings, prompt: Ends(stop))
    assert output.token_ids == expected(given)[num_tokens:6]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "END")


def stopped() -> GenerateRequest:
    last = expected(GIVEN)[4]
    assert last not in expected(GIVEN)[:4]
    return replace(GIVEN, sampling=replace(GIVEN.sampling, stop_token_ids=(last,)))


@pytest.mark.parametrize(
    ("given", "num_tokens", "finish_reason", "stop_reason"),
    [
        (GIVEN, 12, FinishReason.LENGTH, None),
        (stopped(), 5, FinishReason.STOP, expected(GIVEN)[4]),
    ],
)
def test_output_of_which_only_the_word_that_it_has_ended_was_lost_ends_without_a_step(
    given: GenerateRequest, num_tokens: int, finish_reason: FinishReason, stop_reason: int | None
) -> None:
    output, pair = answer(resumed(given, num_tokens))
    assert output.token_ids == ()
    assert (output.finish_reason, output.stop_reason) == (finish_reason, stop_reason)
    assert pair.counted("specray_rounds_total") == 0


def test_session_begins_with_what_the_target_was_never_told() -> None:
    session = Session(resumed(GIVEN, 4), None, vocab_size=64)
    assert (session.num_output_tokens, session.num_remaining, session.num_missing) == (4, 8, 9)
    assert session.is_prefilling and not session.is_finished


def test_first_token_is_counted_where_it_was_written() -> None:
    output, pair = answer(resumed(GIVEN, 4))
    assert output.ttft_s is None
    assert pair.counted("specray_time_to_first_token_seconds_count") == 0
    assert pair.counted("specray_output_tokens_total") == 8
    assert pair.counted("specray_requests_resumed_total") == 1
    output, pair = answer(GIVEN)
    assert output.ttft_s is not None
    assert pair.counted("specray_time_to_first_token_seconds_count") == 1
    assert pair.counted("specray_requests_resumed_total") == 0


def test_full_router_takes_it_and_serves_it_before_those_that_wait() -> None:
    clock = VirtualClock()

    async def main() -> None:
        config = router_config(max_queued_requests=1)
        async with serving(clock, target=fake_target(max_num_seqs=1), config=config) as pair:
            ended: list[str] = []
            tasks = [await begin(pair, ended, of_tenant(name, "")) for name in ("runs", "waits")]
            given = replace(resumed(GIVEN, 4), quota=Quota("team", max_requests=0))
            output = await pair.router.complete(given)
            assert output.token_ids == expected(GIVEN)[4:]
            assert ended == ["runs"]
            await asyncio.gather(*tasks)
            assert len(pair.router._sessions._quotas) == 0
            await pair.settle()

    run(clock, main())


def test_tenant_gets_nothing_back_for_what_another_router_has_charged() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock, target=fake_target(max_num_seqs=1), num_speculative_tokens=0) as pair:
            ended: list[str] = []
            names = ("first", "second", "third", "fourth")
            tasks = [await begin(pair, ended, of_tenant(name, "x")) for name in names]
            queue = pair.router._sessions._queue
            await asyncio.sleep(6 * TARGET_S)
            assert list(pair.router._sessions.running) == ["second"]
            charged = queue._classes[0].lines["x"].tag
            assert charged == len(GIVEN.prompt_token_ids) + 4
            call = asyncio.create_task(
                pair.router.complete(resumed(of_tenant("long", "x", max_tokens=100), 10))
            )
            await asyncio.sleep(10 * TARGET_S)
            assert list(pair.router._sessions.running) == ["b"]
            call.cancel()
            await asyncio.sleep(2 * TARGET_S)
            assert list(pair.router._sessions.running) == ["third"]
            assert queue._classes[0].lines["x"].tag == 2 * charged
            await asyncio.gather(*tasks)
            await pair.settle()

    run(clock, main())


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ((), "resumed has 0 tokens; allowed: 1..12, which is max_tokens"),
        ((1,) * 13, "resumed has 13 tokens; allowed: 1..12, which is max_tokens"),
        (
            (1, MODEL.vocab_size),
            f"resumed holds token id {MODEL.vocab_size}; allowed: 0..{MODEL.vocab_size - 1}",
        ),
    ],
)
def test_what_no_router_can_have_written_is_refused(token_ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        answer(replace(GIVEN, resumed=Resumption(token_ids, "checkpoint")))
    assert str(caught.value) == message and caught.value.field == "resumed"


async def test_another_checkpoint_does_not_go_on_with_an_output() -> None:
    """``RouterReplica`` compares only its own checkpoint name."""
    served = parse_config({"target": {"model": "/models/new"}}).target.checkpoint
    begun = parse_config({"target": {"model": "/models/old"}}).target.checkpoint
    assert served != parse_config({"target": {"model": "/models/new", "dtype": "float32"}}).target.checkpoint
    replica: Any = SimpleNamespace(_checkpoint=served)
    given = replace(GIVEN, resumed=Resumption(expected(GIVEN)[:3], begun))
    answer = await RouterReplica.deliver(replica, given, "unix:/nowhere")
    assert isinstance(answer, EngineLostError)
    assert str(answer) == "another target serves now; the request may be sent again"
