"""The theorem: whatever the draft, K and overlap, the output is the target's alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from specray.errors import EngineLostError
from specray.fakes import (
    AdversarialGuesser,
    EmptyGuesser,
    FakeTarget,
    LocalDrafter,
    LocalVerifier,
    NoisyGuesser,
    PerfectGuesser,
    RandomGuesser,
    ToyModel,
    Transport,
    VirtualClock,
)
from specray.interfaces import Drafter, Verifier
from specray.requests import FinishReason, GenerateRequest
from tests.unit.router.harness import (
    MODEL,
    expected,
    fake_draft,
    fake_target,
    request,
    router_config,
    run,
    serving,
)

GUESSERS = {
    "perfect": PerfectGuesser(MODEL),
    "noisy": NoisyGuesser(MODEL),
    "random": RandomGuesser(MODEL),
    "adversarial": AdversarialGuesser(MODEL),
    "empty": EmptyGuesser(),
    "dying": PerfectGuesser(MODEL),
}
LENGTHS = [
    k if k in (0, 1, 3, "auto") else pytest.param(k, marks=pytest.mark.slow) for k in (*range(9), "auto")
]
"""Proposal lengths; those that differ most from each other are quick tests, too."""
OVERLAPS = ("serial", "ahead", "enumerate", "auto")


def _requests() -> list[GenerateRequest]:
    """Of all lengths: several chunks of prefill, one token of output, seeded sampling."""
    return [
        request("short", (7,), 1),
        request("long", tuple(index % 64 for index in range(70)), 23),
        request("seeded", (9, 8, 7), 17, temperature=1.0, seed=1234),
        request("stopped", (5, 5, 5), 40, stop_token_ids=(11, 12, 13), eos=(11,)),
    ]


def _truth(given: GenerateRequest) -> tuple[int, ...]:
    tokens = expected(given)
    stops = [index for index, token in enumerate(tokens) if token in given.sampling.stop_token_ids]
    return tokens[: stops[0] + 1] if stops else tokens


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("name", GUESSERS)
@pytest.mark.parametrize("k", LENGTHS)
def test_output_is_the_targets_alone(name: str, k: int | str, overlap: str) -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(GUESSERS[name])
        dies_after = 3 if name == "dying" else None

        def lease(number: int) -> Drafter:
            return LocalDrafter(draft, clock, dies_after=dies_after)

        async with serving(
            clock,
            draft=draft,
            make_drafter=lease,
            config=router_config(prefill_chunk_tokens=16),
            overlap=overlap,
            num_speculative_tokens=k,
        ) as pair:
            given = _requests()
            outputs = await asyncio.gather(*(pair.router.complete(each) for each in given))
            for each, output in zip(given, outputs, strict=True):
                assert output.token_ids == _truth(each), each.request_id
                assert output.finish_reason in {FinishReason.LENGTH, FinishReason.STOP}
            rounds = pair.counted("specray_rounds_total")
            accepted = pair.counted("specray_spec_decode_num_accepted_tokens_total")
            cut = accepted + rounds - sum(len(output.token_ids) for output in outputs)
            assert 0 <= cut <= 8, "only tokens after the stop of one request are dropped"
            if k == 0 or name == "empty":
                assert pair.counted("specray_spec_decode_num_drafts_total") == 0
            if k == 0:
                assert draft.num_steps == 0, "K = 0 does not touch the draft"
            if name == "perfect" and isinstance(k, int):
                drafted = pair.counted("specray_spec_decode_num_draft_tokens_total")
                behind_the_stop = drafted - accepted
                assert 0 <= behind_the_stop < max(1, k), "all others are accepted"
                assert (accepted > 0) == (k > 0)
            if name != "dying":
                await pair.settle()

    run(clock, main())


class PaddedGuesser:
    """Right where the target's token is one that it has; every eighth time it says one of its own padding."""

    def __init__(self, model: ToyModel, num_ids: int) -> None:
        self._model, self._num_ids = model, num_ids

    def ranked(self, tokens: Sequence[int], seed: int, count: int) -> tuple[int, ...]:
        best = self._model.ranked(tokens, seed, count)
        if best[0] % 8 == 0:
            return (self._num_ids - 1, *best[: count - 1])
        return tuple(token for token in best if token < self._num_ids)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("num_ids", [48, 80])
def test_pair_with_vocabularies_padded_to_different_widths(num_ids: int, overlap: str) -> None:
    """Narrower than the target's, where outputs hold tokens that the draft has not, and wider."""
    clock = VirtualClock()
    model = ToyModel(context_len=2)

    async def main() -> None:
        draft = fake_draft(PaddedGuesser(model, num_ids), vocab_size=num_ids)
        target = FakeTarget(model, cost=lambda rows: 20_000_000)
        async with serving(
            clock, target=target, draft=draft, overlap=overlap, num_speculative_tokens=3
        ) as pair:
            given = [request(str(index), (index, 63 - index, 5), 40) for index in range(4)]
            outputs = await asyncio.gather(*(pair.router.complete(each) for each in given))
            for each, output in zip(given, outputs, strict=True):
                assert output.token_ids == model.generate(each.prompt_token_ids, 40), each.request_id
            assert max(max(output.token_ids) for output in outputs) >= 48, "some that a narrow draft has not"
            assert draft.num_refused == 0
            assert pair.counted("specray_spec_decode_num_accepted_tokens_total") > 20
            await pair.settle()

    run(clock, main())


@pytest.mark.parametrize("overlap", ["serial", "ahead", "enumerate"])
def test_counters_add_up_without_a_stop(overlap: str) -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock, overlap=overlap, num_speculative_tokens=3) as pair:
            outputs = await asyncio.gather(
                *(pair.router.complete(request(str(index), (index,), 50)) for index in range(5))
            )
            accepted = pair.counted("specray_spec_decode_num_accepted_tokens_total")
            assert accepted + pair.counted("specray_rounds_total") == 5 * 50
            assert pair.counted("specray_output_tokens_total") == 5 * 50
            stats = [output.stats for output in outputs]
            assert all(each is not None for each in stats)
            assert sum(each.num_accepted_draft_tokens for each in stats if each) == accepted
            assert all(sum(each.acceptance_histogram) == each.num_spec_steps for each in stats if each)

    run(clock, main())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_delay_loss_duplication_and_reordering_change_nothing(seed: int, overlap: str) -> None:
    """Draft and target lose sequences at any time as well; a lost target is connected anew."""
    clock = VirtualClock()
    rng = random.Random(seed)

    async def main() -> None:
        target, draft = fake_target(), fake_draft()
        connections: list[LocalVerifier] = []

        async def connect() -> Verifier:
            transport = Transport(rng, max_delay_s=0.03, loss=0.01, duplication=0.2)
            connections.append(LocalVerifier(target, clock, transport=transport))
            return connections[-1]

        def lease(number: int) -> Drafter:
            transport = Transport(rng, max_delay_s=0.05, loss=0.1, duplication=0.2)
            dies_after = rng.choice([None, 20])
            return LocalDrafter(draft, clock, transport=transport, dies_after=dies_after)

        async def forget() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                name = rng.choice(["0", "1", "2", "3"])
                rng.choice([target.forget, draft.forget])(name)

        async with serving(
            clock,
            target=target,
            draft=draft,
            verifier=connect,
            make_drafter=lease,
            config=router_config(prefill_chunk_tokens=16, verify_timeout_s=0.5, round_timeout_s=0.3),
            overlap=overlap,
            num_speculative_tokens=3,
        ) as pair:
            forgetting = asyncio.create_task(forget())
            given = [request(str(index), tuple(range(1, 30 - index)), 30) for index in range(4)]
            outputs = await asyncio.gather(*(pair.router.complete(each) for each in given))
            forgetting.cancel()
            assert [output.token_ids for output in outputs] == [expected(each) for each in given]
            accepted = pair.counted("specray_spec_decode_num_accepted_tokens_total")
            assert accepted + pair.counted("specray_rounds_total") == 4 * 30
            assert clock.monotonic() < 60.0, "something waited for what could not come"
            await asyncio.sleep(1.0)
            assert target.held_request_ids == frozenset()

    run(clock, main())


def test_a_target_that_cannot_be_connected_anew_fails_all() -> None:
    clock = VirtualClock()

    async def main() -> None:
        target = fake_target()
        connections: list[LocalVerifier] = []

        async def connect() -> Verifier:
            if connections:
                raise EngineLostError("no route")
            connections.append(LocalVerifier(target, clock))
            return connections[0]

        config = router_config(start_timeout_s=3.0)
        async with serving(clock, target=target, verifier=connect, config=config) as pair:
            first = asyncio.create_task(pair.router.complete(request("a", max_tokens=1000)))
            await asyncio.sleep(0.5)
            connections[0].lose()
            with pytest.raises(EngineLostError, match="no route"):
                await first
            with pytest.raises(EngineLostError, match="lost"):
                await pair.router.complete(request("b"))
            with pytest.raises(EngineLostError):
                await pair.router.check_ready()

    run(clock, main())
