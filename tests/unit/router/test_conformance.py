"""The theorem: whatever drafts, whatever K and overlap, whatever is lost: the output is the target's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from specray.errors import EngineLostError
from specray.fakes import (
    AdversarialGuesser,
    EmptyGuesser,
    FakeTarget,
    FakeTransport,
    LocalDrafter,
    LocalVerifier,
    NoisyGuesser,
    PerfectGuesser,
    RandomGuesser,
    ToyModel,
    VirtualClock,
)
from specray.fakes.models import ToyGuesser
from specray.interfaces import Drafter, Verifier
from specray.requests import FinishReason, GenerateRequest, OutputChunk, SpeculationParams
from specray.router.session.values import FALLBACK, PREDICTION
from specray.types import DraftKind, Verification
from tests.pairwise import pairs
from tests.unit.router.drafts import EDITS, PaddedGuesser, TreeDraft, predicting
from tests.unit.router.harness import Pair, fake_draft, request, router_config, serving
from tests.unit.router.proposers.harness import CHANGING, REPEATING, of_source, target_of, truth

OVERLAPS = ("serial", "ahead", "enumerate", "auto")
LENGTHS = (0, 1, 2, 3, 8, "auto")
GUESSERS: dict[str, ToyGuesser] = {
    "perfect": PerfectGuesser(CHANGING),
    "noisy": NoisyGuesser(CHANGING, agreement=0.8),
    "random": RandomGuesser(CHANGING),
    "adversarial": AdversarialGuesser(CHANGING),
    "empty": EmptyGuesser(),
    "dying": PerfectGuesser(CHANGING),
}
DRAFTS = (
    *(f"model {name}" for name in GUESSERS),
    "model noisy trees",
    "model random trees",
    "nothing",
    *(f"{kind} {text}" for kind in ("ngram", "suffix") for text in ("repeating", "changing")),
    *(f"lookahead {name}" for name in ("perfect", "noisy", "random")),
    *(f"features {name}" for name in ("perfect", "noisy", "random", "adversarial", "empty")),
)
"""What drafts: its kind, and its guesser or the text in which it looks."""


def all_kinds(model: ToyModel, prediction: str) -> list[GenerateRequest]:
    """A prompt of several chunks, one output token and few, all ways to sample, a stop, another draft."""
    ngram = SpeculationParams(draft=DraftKind.NGRAM)
    given = [
        request("short", (7,), 1),
        request("few", (5, 5), 3),
        request("long", tuple(index % 8 for index in range(70)), 23),
        request("greedy", (5, 5, 5), 40),
        request("seeded", (4, 3, 2), 30, temperature=1.0, seed=1234, num_logprobs=0),
        request("rejected", (1, 2), 30, temperature=1.0, seed=9, verification=Verification.REJECTION),
        request("stopped", (5, 5, 5), 40, stop_token_ids=(3, 11, 12, 13), eos=(11,)),
        request("ngram", (1, 3), 30, speculation=ngram),
    ]
    return [predicting(each, truth(model, each), prediction) if prediction else each for each in given]


def until_stop(model: ToyModel, given: GenerateRequest) -> tuple[int, ...]:
    tokens = truth(model, given)
    stops = [index for index, token in enumerate(tokens) if token in given.sampling.stop_token_ids]
    return tokens[: stops[0] + 1] if stops else tokens


async def check_outputs(pair: Pair, model: ToyModel, given: Sequence[GenerateRequest]) -> list[OutputChunk]:
    """Serves all at once: outputs are the target's, and every counter says how they came to be."""
    outputs = list(await asyncio.gather(*(pair.router.complete(each) for each in given)))
    for each, output in zip(given, outputs, strict=True):
        assert output.token_ids == until_stop(model, each), each.request_id
        assert output.finish_reason in {FinishReason.LENGTH, FinishReason.STOP}
        has_logprobs = each.sampling.num_logprobs is not None
        assert tuple(entry.token_id for entry in output.logprobs) == (
            output.token_ids if has_logprobs else ()
        )
    num_tokens = sum(len(output.token_ids) for output in outputs)
    accepted = pair.counted("specray_spec_decode_num_accepted_tokens_total")
    cut = accepted + pair.counted("specray_rounds_total") - num_tokens
    assert 0 <= cut <= 32, "only tokens after the stop of one request are dropped"
    assert pair.counted("specray_output_tokens_total") == num_tokens
    totals = tuple(
        pair.counted(f"specray_spec_decode_{name}_total")
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    sources = (*(kind.value for kind in DraftKind), FALLBACK, PREDICTION)
    assert totals == tuple(map(sum, zip(*(of_source(pair, source) for source in sources), strict=True)))
    stats = [output.stats for output in outputs if output.stats is not None]
    assert sum(each.num_accepted_draft_tokens for each in stats) == accepted
    assert all(sum(each.acceptance_histogram) == each.num_spec_steps for each in stats)
    return outputs


@pairs(
    drafts=DRAFTS, k=LENGTHS, overlap=OVERLAPS, tree=("off", "12", "3x2x1", "auto"), prediction=("", *EDITS)
)
async def test_output_is_the_targets_alone(
    clock: VirtualClock, drafts: str, k: int | str, overlap: str, tree: str, prediction: str
) -> None:
    kind, _, name = drafts.partition(" ")
    name, _, trees = name.partition(" ")
    guesser, is_dying = GUESSERS.get(name), name == "dying"
    model = REPEATING if name == "repeating" else CHANGING
    draft = TreeDraft(GUESSERS[name], seed=8) if trees else fake_draft(guesser if kind == "model" else None)
    target = FakeTarget(
        model,
        info=target_of(model).info,
        cost=lambda rows: 20_000_000,
        ahead=guesser if kind == "lookahead" else None,
        drafter=guesser if kind == "features" else None,
    )
    async with serving(
        clock,
        target=target,
        draft=draft,
        make_drafter=lambda _: LocalDrafter(draft, clock, dies_after=3 if is_dying else None),
        draft_kind=DraftKind.MODEL if kind == "nothing" else DraftKind(kind),
        has_draft_model=kind == "model",
        config=router_config(prefill_chunk_tokens=16),
        overlap=overlap,
        num_speculative_tokens=k,
        tree=tree,
        fallback="ngram" if prediction else "none",
    ) as pair:
        await check_outputs(pair, model, all_kinds(model, prediction))
        num_drafts, drafted, accepted = of_source(pair, kind)
        _, _, predicted = of_source(pair, PREDICTION)
        if k == 0:
            assert pair.counted("specray_spec_decode_num_drafts_total") == 0
            assert draft.num_steps == 0 and not target.lookaheads, "K = 0 asks nobody"
        elif prediction:
            assert k == 1 or (predicted >= 30) == (prediction not in ("unrelated", "wrong"))
        elif name != "changing" and kind != "nothing" and not is_dying:
            assert (num_drafts > 0) == (name != "empty")
        if name == "adversarial":
            assert accepted == 0
        if drafts in ("model perfect", "features perfect") and tree == "off" and isinstance(k, int):
            assert 0 <= drafted - accepted < max(1, k), "all but those after a stop are accepted"
        if not is_dying:
            await pair.settle()


@pairs(
    drafts=("chains", "trees", "features", "ngram", "suffix", "prediction"),
    overlap=OVERLAPS,
    model={"repeating": REPEATING, "changing": CHANGING},
    seed=(*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))),
)
async def test_loss_delay_duplication_and_reordering_change_nothing(
    clock: VirtualClock, drafts: str, overlap: str, model: ToyModel, seed: int
) -> None:
    """Engines forget sequences and end at any time; no draft is to be had for a while."""
    rng = random.Random(f"{drafts} {overlap} {seed}")
    guesser = NoisyGuesser(model, agreement=0.8)
    draft = TreeDraft(guesser, seed) if drafts == "trees" else fake_draft(guesser)
    target = target_of(model)
    if drafts == "features":
        target = FakeTarget(model, info=target.info, cost=lambda rows: 20_000_000, drafter=guesser)

    async def connect() -> Verifier:
        transport = FakeTransport(rng, max_delay_s=0.03, loss=0.01, duplication=0.2)
        return LocalVerifier(target, clock, transport=transport)

    def lease(number: int) -> Drafter:
        if rng.random() < 0.3:
            raise EngineLostError("no draft")
        transport = FakeTransport(rng, max_delay_s=0.05, loss=0.1, duplication=0.2)
        return LocalDrafter(draft, clock, transport=transport, dies_after=rng.choice([None, 4, 20]))

    async def forget() -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            rng.choice([target.forget, draft.forget])(rng.choice("0123"))

    options: dict[str, Any] = {"fallback": drafts} if drafts in ("ngram", "suffix") else {}
    if drafts == "features":
        options["draft_kind"] = DraftKind.FEATURES
    async with serving(
        clock,
        target=target,
        draft=draft,
        verifier=connect,
        make_drafter=lease,
        config=router_config(prefill_chunk_tokens=16, verify_timeout_s=0.5, round_timeout_s=0.3),
        overlap=overlap,
        num_speculative_tokens=3,
        **options,
    ) as pair:
        forgetting = asyncio.create_task(forget())
        given = [
            request(str(index), tuple(place % 8 for place in range(30 - index)), 40) for index in range(4)
        ]
        if drafts == "prediction":
            given = [predicting(each, truth(model, each), "edited") for each in given]
        await check_outputs(pair, model, given)
        forgetting.cancel()
        assert (
            pair.counted("specray_rounds_total")
            + pair.counted("specray_spec_decode_num_accepted_tokens_total")
            == 4 * 40
        )
        assert clock.monotonic() < 60.0, "something waited for what could not come"
        await asyncio.sleep(1.0)
        assert target.held_request_ids == frozenset()


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("num_ids", [48, 80])
async def test_pair_with_vocabularies_padded_to_different_widths(
    clock: VirtualClock, num_ids: int, overlap: str
) -> None:
    """Narrower than the target's, where outputs hold tokens that the draft has not, and wider."""
    model = ToyModel(context_len=2)
    draft = fake_draft(PaddedGuesser(model, num_ids), vocab_size=num_ids)
    target = FakeTarget(model, cost=lambda rows: 20_000_000)
    async with serving(clock, target=target, draft=draft, overlap=overlap, num_speculative_tokens=3) as pair:
        outputs = await check_outputs(
            pair, model, [request(str(index), (index, 63 - index, 5), 40) for index in range(4)]
        )
        assert max(max(output.token_ids) for output in outputs) >= 48, "some that a narrow draft has not"
        assert draft.num_refused == 0
        assert pair.counted("specray_spec_decode_num_accepted_tokens_total") > 20
        await pair.settle()
