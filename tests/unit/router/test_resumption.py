"""Resumption: when a router is lost in the middle of an output, another continues it seamlessly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specray.errors import EngineLostError, InvalidRequestError
from specray.fakes import VirtualClock
from specray.requests import FinishReason, GenerateRequest, OutputChunk, Quota, Resumption
from specray.router.session.session import Session
from specray.types import VerifyItem
from tests.unit.router.harness import (
    MODEL,
    TARGET_S,
    Pair,
    begin,
    charged,
    expected,
    fake_target,
    of_tenant,
    request,
    router_config,
    serving,
)

GIVEN = request(max_tokens=12, temperature=1.0, seed=5)


def resumed(given: GenerateRequest, num_tokens: int, *, request_id: str = "b") -> GenerateRequest:
    """The request as a second router gets it, after ``num_tokens`` output tokens of the first."""
    done = Resumption(expected(given)[:num_tokens], "toy-target")
    return replace(given, request_id=request_id, resumed=done)


async def answer(clock: VirtualClock, given: GenerateRequest, **options: Any) -> tuple[OutputChunk, Pair]:
    """Answer of a separate router, and the pair it ran on."""
    async with serving(clock, **options) as pair:
        output = await pair.router.complete(given)
        await pair.settle()
        return output, pair


@pytest.mark.parametrize("num_tokens", range(1, 12))
async def test_output_goes_on_wherever_it_was_cut_with_the_same_tokens(
    clock: VirtualClock, num_tokens: int
) -> None:
    output, _ = await answer(clock, resumed(GIVEN, num_tokens))
    assert output.token_ids == expected(GIVEN)[num_tokens:]
    assert output.finish_reason is FinishReason.LENGTH


async def test_penalties_and_noise_know_where_the_prompt_ended(clock: VirtualClock) -> None:
    target = fake_target()
    sent: list[VerifyItem] = []
    verify = target.verify
    target.verify = lambda items: (sent.extend(items), verify(items))[1]  # type: ignore[method-assign]
    await answer(clock, resumed(GIVEN, 7), target=target)
    assert sent[0].token_ids == GIVEN.prompt_token_ids + expected(GIVEN)[:7]
    assert sent[0].sampling is not None and sent[0].sampling.num_prompt_tokens == len(GIVEN.prompt_token_ids)


class Ends:
    """Matcher of a stop string of three tokens."""

    def __init__(self, stop: Sequence[int]) -> None:
        self._stop, self._seen = list(stop), list[int]()

    def push(self, token_ids: Sequence[int]) -> str | None:
        self._seen.extend(token_ids)
        return "END" if self._seen[-len(self._stop) :] == self._stop else None


@pytest.mark.parametrize("num_tokens", [3, 4, 5])
async def test_stop_string_that_was_begun_before_the_cut_ends_the_output(
    clock: VirtualClock, num_tokens: int
) -> None:
    given = replace(GIVEN, stop=("END",))
    stop = expected(given)[3:6]
    given = resumed(given, num_tokens)
    output, _ = await answer(clock, given, stop_matchers=lambda strings, prompt: Ends(stop))
    assert output.token_ids == expected(GIVEN)[num_tokens:6]
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
async def test_output_of_which_only_the_word_that_it_has_ended_was_lost_ends_without_a_step(
    clock: VirtualClock,
    given: GenerateRequest,
    num_tokens: int,
    finish_reason: FinishReason,
    stop_reason: int | None,
) -> None:
    output, pair = await answer(clock, resumed(given, num_tokens))
    assert output.token_ids == ()
    assert (output.finish_reason, output.stop_reason) == (finish_reason, stop_reason)
    assert pair.counted("specray_rounds_total") == 0


def test_session_begins_with_what_the_target_was_never_sent() -> None:
    session = Session(resumed(GIVEN, 4), None, vocab_size=64)
    assert (session.num_output_tokens, session.num_remaining, session.num_missing) == (4, 8, 9)
    assert session.is_prefilling and not session.is_finished


@pytest.mark.parametrize(("given", "is_resumed"), [(resumed(GIVEN, 4), True), (GIVEN, False)])
async def test_first_token_is_counted_where_it_was_written(
    clock: VirtualClock, given: GenerateRequest, is_resumed: bool
) -> None:
    output, pair = await answer(clock, given)
    assert (output.ttft_s is None) is is_resumed
    assert pair.counted("specray_time_to_first_token_seconds_count") == (not is_resumed)
    assert pair.counted("specray_output_tokens_total") == (8 if is_resumed else 12)
    assert pair.counted("specray_requests_resumed_total") == is_resumed


async def test_full_router_takes_it_and_serves_it_before_those_that_wait(clock: VirtualClock) -> None:
    config = router_config(max_queued_requests=1)
    async with serving(clock, target=fake_target(max_num_seqs=1), config=config) as pair:
        ended: list[str] = []
        tasks = [await begin(pair, ended, of_tenant(name, "")) for name in ("runs", "waits")]
        given = replace(resumed(GIVEN, 4), quota=Quota("team", max_requests=0))
        output = await pair.router.complete(given)
        assert output.token_ids == expected(GIVEN)[4:]
        assert ended == ["runs"]
        await asyncio.gather(*tasks)
        # It has left its key's one place free.
        await pair.router.complete(replace(request("later"), quota=Quota("team", max_requests=1)))
        await pair.settle()


async def test_tenant_gets_nothing_back_for_what_another_router_has_charged(clock: VirtualClock) -> None:
    async with serving(clock, target=fake_target(max_num_seqs=1), num_speculative_tokens=0) as pair:
        ended: list[str] = []
        names = ("first", "second", "third", "fourth")
        tasks = [await begin(pair, ended, of_tenant(name, "x")) for name in names]
        await asyncio.sleep(6 * TARGET_S)
        assert pair.target.held_request_ids == {"second"}
        before = charged(pair, "x")
        assert before == len(GIVEN.prompt_token_ids) + 4
        call = asyncio.create_task(pair.router.complete(resumed(of_tenant("long", "x", max_tokens=100), 10)))
        await asyncio.sleep(10 * TARGET_S)
        assert pair.target.held_request_ids == {"b"}
        call.cancel()
        await asyncio.sleep(2 * TARGET_S)
        assert pair.target.held_request_ids == {"third"}
        assert charged(pair, "x") == 2 * before
        await asyncio.gather(*tasks)
        await pair.settle()


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
async def test_what_no_router_can_have_written_is_refused(
    clock: VirtualClock, token_ids: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await answer(clock, replace(GIVEN, resumed=Resumption(token_ids, "toy-target")))
    assert str(caught.value) == message and caught.value.field == "resumed"


async def test_another_checkpoint_does_not_go_on_with_an_output(clock: VirtualClock) -> None:
    with pytest.raises(EngineLostError, match="another target serves now; the request may be sent again"):
        await answer(clock, replace(GIVEN, resumed=Resumption(expected(GIVEN)[:2], "of an older file")))


async def test_the_first_chunk_of_a_stream_names_the_checkpoint(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        chunks = [chunk async for chunk in pair.router.stream(GIVEN)]
    assert [chunk.checkpoint for chunk in chunks] == ["toy-target", *[""] * (len(chunks) - 1)]
    assert len(chunks) > 1
