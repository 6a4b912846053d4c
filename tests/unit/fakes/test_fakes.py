"""The fakes follow the protocol, so that tests against them are meaningful."""

from __future__ import annotations

import asyncio
import random

import pytest

from specray.bench.router import measure_router
from specray.draft_tokens import DraftTokens
from specray.errors import EngineLostError, OverloadedError, ProtocolError
from specray.fakes import (
    AdversarialGuesser,
    FakeDraft,
    FakeRouterClient,
    FakeTarget,
    FakeTransport,
    LocalVerifier,
    NoisyGuesser,
    PerfectGuesser,
    VirtualClock,
)
from specray.requests import FinishReason
from specray.types import (
    ItemFailed,
    Outcomes,
    Overlap,
    SamplingParams,
    SpeculateItem,
    UnknownSequence,
    Verdict,
    VerifyItem,
)
from tests.unit.router.harness import MODEL, PROMPT, request

GREEDY = SamplingParams(temperature=0.0)


def first_item(tokens: tuple[int, ...] = PROMPT, drafts: tuple[int, ...] = ()) -> VerifyItem:
    return VerifyItem("a", 1, 0, tokens, DraftTokens(drafts), sampling=GREEDY)


# The clock


def test_virtual_time_passes_only_when_everything_waits() -> None:
    clock = VirtualClock()
    order: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        order.append((name, clock.monotonic()))

    async def main() -> None:
        await asyncio.gather(sleeper("late", 3600.0), sleeper("early", 0.5))

    clock.run(main())
    assert order == [("early", 0.5), ("late", 3600.0)]


def test_virtual_time_says_when_nothing_can_ever_happen() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing can ever happen"):
        VirtualClock().run(main())


# The toy pair


def test_every_earlier_token_matters() -> None:
    long = list(range(40))
    changed = [63, *long[1:]]
    assert MODEL.generate(long, 8) != MODEL.generate(changed, 8)


def test_seed_changes_sampling_and_nothing_else() -> None:
    assert MODEL.generate(PROMPT, 8, seed=1) != MODEL.generate(PROMPT, 8, seed=2)
    assert MODEL.generate(PROMPT, 8, seed=1) == MODEL.generate(PROMPT, 8, seed=1)


def test_adversary_never_guesses_right_and_the_noisy_one_half_the_time() -> None:
    rng = random.Random(0)
    prefixes = [[rng.randrange(64) for _ in range(6)] for _ in range(1000)]
    truth = [MODEL.next_token(prefix, 0) for prefix in prefixes]
    wrong, noisy = AdversarialGuesser(MODEL), NoisyGuesser(MODEL, agreement=0.5)
    assert not any(t in wrong.ranked(p, 0, 8) for p, t in zip(prefixes, truth, strict=True))
    hits = sum(t == noisy.ranked(p, 0, 1)[0] for p, t in zip(prefixes, truth, strict=True))
    assert 450 < hits < 550


# The engines


def test_target_keeps_appends_and_verifies() -> None:
    target = FakeTarget(MODEL)
    truth = MODEL.generate(PROMPT, 3)
    reply = target.verify([first_item(drafts=(truth[0], truth[1], (truth[2] + 1) % 64))]).replies[0]
    assert reply == Verdict("a", 1, 0, 2, truth[2])


def test_target_does_not_know_what_it_was_not_told() -> None:
    target = FakeTarget(MODEL)
    target.verify([first_item()])
    beyond = VerifyItem("a", 2, len(PROMPT) + 1, (7,))
    assert target.verify([beyond]).replies[0] == UnknownSequence("a", 2, len(PROMPT) + 1)
    target.forget("a")
    assert isinstance(target.verify([VerifyItem("a", 3, 2, (7,))]).replies[0], UnknownSequence)


def test_target_refuses_steps_beyond_its_limits_and_sequences_beyond_its_room() -> None:
    target = FakeTarget(MODEL)
    with pytest.raises(ProtocolError):
        target.verify([first_item(tuple([1] * 2049))])
    for index in range(64):
        target.verify([VerifyItem(str(index), 1, 0, (1,), sampling=GREEDY)])
    reply = target.verify([first_item()]).replies[0]
    assert isinstance(reply, ItemFailed) and reply.is_retriable
    target.release(["0"])
    assert isinstance(target.verify([first_item()]).replies[0], Verdict)


def test_draft_enumerates_a_general_fan_out() -> None:
    draft = FakeDraft(PerfectGuesser(MODEL))
    proposed = (10, 11)
    item = SpeculateItem("a", 1, 0, PROMPT, 3, proposed, (2, 0, 1), GREEDY)
    reply = draft.speculate([item]).replies[0]
    assert isinstance(reply, Outcomes)
    assert [branch.num_accepted_tokens for branch in reply.branches] == [0, 0, 2]
    for branch in reply.branches:
        assert branch.next_token_id not in proposed[branch.num_accepted_tokens :][:1]
        prefix = [*PROMPT, *proposed[: branch.num_accepted_tokens], branch.next_token_id]
        assert branch.draft.token_ids == MODEL.generate(prefix, 3)


# Connections


def test_transport_loses_doubles_and_reorders_by_its_seed() -> None:
    def arrivals(seed: int) -> list[int]:
        clock = VirtualClock()

        async def main() -> list[int]:
            transport = FakeTransport(random.Random(seed), max_delay_s=1.0, loss=0.2, duplication=0.3)
            verifier = LocalVerifier(FakeTarget(MODEL), clock, transport=transport)
            for round_id in range(1, 30):
                await verifier.verify([VerifyItem("a", round_id, 0, PROMPT, sampling=GREEDY)])
            seen: list[int] = []
            asyncio.get_running_loop().call_later(5.0, verifier.lose)
            try:
                while True:
                    seen += [reply.round_id for reply in (await verifier.replies()).replies]
            except EngineLostError:
                return seen

        return clock.run(main())

    seen = arrivals(3)
    assert seen == arrivals(3)
    assert seen != sorted(seen)
    assert len(set(seen)) < 29
    assert len(set(seen)) < len(seen)


# The fake router


async def test_fake_client_echoes_the_prompt_and_stops_like_the_router() -> None:
    client = FakeRouterClient(chunk_size=3)
    chunks = [chunk async for chunk in client.stream(request(prompt=(1, 2), max_tokens=7))]
    assert [chunk.token_ids for chunk in chunks] == [(1, 2, 1), (2, 1, 2), (1,)]
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    stopped = await client.complete(request(prompt=(1, 2), max_tokens=7, stop_token_ids=(2,)))
    assert (stopped.token_ids, stopped.stop_reason) == ((1, 2), 2)


async def test_fake_client_raises_scripted_errors_one_per_call() -> None:
    client = FakeRouterClient(errors=[OverloadedError("full", 3.0)])
    with pytest.raises(OverloadedError):
        await client.complete(request())
    assert (await client.complete(request())).finish_reason is FinishReason.LENGTH


async def test_fake_client_notes_a_stream_that_was_closed_early() -> None:
    client = FakeRouterClient()
    stream = client.stream(request("gone"))
    await anext(stream)
    await stream.aclose()
    assert client.aborted_request_ids == ["gone"]


def test_bench_counts_the_steps_it_measures() -> None:
    cost = measure_router(overlap=Overlap.SERIAL, num_speculative_tokens=0, num_sessions=2, num_tokens=10)
    assert cost.num_steps == 10
