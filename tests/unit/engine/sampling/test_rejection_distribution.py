"""Committed tokens against exact probabilities: chi-square over many seeds, all processors on.

The device's sampler has the CPU's noise, so it is compared seed by seed: were it to differ in 0.6 % of
outputs, 500 seeds would show it with a probability of 95 %. Chi-square over 2,500 finds only larger faults.

A toy target and draft over five tokens, each a table over the last token. Exact probabilities of two output
tokens come from the naive product of processed target rows; the samples from the real draft sampler and the
real verification, with as many rounds as it takes. A wrong rule must fail the same test.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch

from specray.draft_tokens import SparseProbs
from specray.engine.sampling.device.kernels import Kernels
from specray.engine.sampling.device.sampler import DeviceSampler
from specray.engine.sampling.draft import DraftSampler
from specray.engine.sampling.noise import NoiseKey, NoiseSource, Purpose
from specray.engine.sampling.processors import process_logits
from specray.engine.sampling.verify import Round, Verified, verify_rejection, verify_rounds
from specray.types import SamplingParams, Verification
from tests.unit.engine.sampling.p_values import chi_square_p_value
from tests.unit.engine.sampling.rows import row_group

pytestmark = pytest.mark.slow

VOCAB_SIZE = 5
NUM_SAMPLES = 2500
NUM_COMPARED = 500
"""Seeds whose outputs are compared one by one."""
SIGNIFICANCE = 1e-3
PROMPT = [2, 0]
TARGET = 1.2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
DRAFT = TARGET + 0.9 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
PLAIN = SamplingParams(num_prompt_tokens=len(PROMPT), verification=Verification.REJECTION)
PROCESSED = replace(
    PLAIN,
    temperature=0.8,
    top_p=0.93,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((1, 0.5),),
)
COUPLED = replace(PROCESSED, verification=Verification.COUPLED)
Drafts = tuple[list[int], list[SparseProbs]]
Propose = Callable[[list[list[int]], list[SamplingParams], int], list[Drafts]]


class StepRows(NamedTuple):
    """The target's rows of one step."""

    plain: torch.Tensor
    processed: torch.Tensor


Verify = Callable[[StepRows, list[Round]], list[Verified]]


@pytest.fixture(scope="module")
def noise() -> NoiseSource:
    return NoiseSource(VOCAB_SIZE)


def rows(table: torch.Tensor, token_ids: list[int], count: int) -> torch.Tensor:
    return table[token_ids[len(token_ids) - count :]]


def exact(sampling: SamplingParams, num_tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of each output of the target alone."""
    probabilities = {}
    for output in product(range(VOCAB_SIZE), repeat=num_tokens):
        probability = 1.0
        for index, token_id in enumerate(output):
            prefix = PROMPT + list(output[:index])
            processed = process_logits(rows(TARGET, prefix, 1), [row_group(sampling, prefix, 1)])
            probability *= processed[0].double().softmax(-1)[token_id].item()
        probabilities[output] = probability
    return probabilities


@functools.cache
def target_rows(sampling: SamplingParams, known: tuple[int, ...], count: int) -> torch.Tensor:
    """Returns the target's processed last rows; the few prefixes that there are come thousands of times."""
    return process_logits(rows(TARGET, list(known), count), [row_group(sampling, list(known), count)])


def generate(
    samplings: list[SamplingParams], num_tokens: int, num_drafts: int, propose: Propose, verify: Verify
) -> list[tuple[int, ...]]:
    """Returns an output for each sampling; all are drafted and verified side by side."""
    outputs = [list(PROMPT) for _ in samplings]
    end = len(PROMPT) + num_tokens
    while unfinished := [index for index, token_ids in enumerate(outputs) if len(token_ids) < end]:
        current, their = [outputs[index] for index in unfinished], [samplings[index] for index in unfinished]
        rounds, plain, processed = [], [], []
        for token_ids, sampling, (drafts, probs) in zip(
            current, their, propose(current, their, num_drafts), strict=True
        ):
            known, count = token_ids + drafts, len(drafts) + 1
            rounds.append(Round(row_group(sampling, known, count), drafts, probs))
            plain.append(rows(TARGET, known, count))
            processed.append(target_rows(replace(sampling, seed=PLAIN.seed), tuple(known), count))
        for token_ids, item, verified in zip(
            current, rounds, verify(StepRows(torch.cat(plain), torch.cat(processed)), rounds), strict=True
        ):
            token_ids += [*item.draft_token_ids[: verified.num_accepted_tokens], verified.next_token_id]
    return [tuple(token_ids[len(PROMPT) : end]) for token_ids in outputs]


def p_value_of(
    sampling: SamplingParams, num_drafts: int, propose: Propose, verify: Verify, num_samples: int
) -> float:
    """Of the chi-square test of two output tokens of so many seeds."""
    samplings = [replace(sampling, seed=seed) for seed in range(num_samples)]
    return p_value(sampling, generate(samplings, 2, num_drafts, propose, verify))


def p_value(sampling: SamplingParams, outputs: list[tuple[int, ...]]) -> float:
    """Of the chi-square test of two output tokens; outputs expected less than five times are pooled."""
    expected, num_samples = exact(sampling, 2), len(outputs)
    seen = Counter(outputs)
    assert all(expected[output] > 0.0 for output in seen), "an impossible output was committed"
    common = [output for output, probability in expected.items() if probability * num_samples >= 5]
    observed = [float(seen[output]) for output in common]
    wanted = [expected[output] * num_samples for output in common]
    rest = num_samples - sum(wanted)
    if rest >= 1.0:
        observed.append(num_samples - sum(observed))
        wanted.append(rest)
    scale = sum(observed) / sum(wanted)
    return chi_square_p_value(observed, [value * scale for value in wanted])


def sampled_draft(
    noise: NoiseSource,
    *,
    support: int = 64,
    verification: Verification | None = None,
    on_device: bool = False,
) -> Propose:
    """The draft engine's own sampler over the toy draft."""
    on_cpu = DraftSampler(noise, max_num_draft_probs=support)
    sampler = DeviceSampler(Kernels(), support) if on_device else on_cpu

    def propose(token_ids: list[list[int]], samplings: list[SamplingParams], num_drafts: int) -> list[Drafts]:
        samplings = [replace(each, verification=verification or each.verification) for each in samplings]
        known: list[list[int]] = [list(tokens) for tokens in token_ids]
        probs: list[list[SparseProbs]] = [[] for _ in token_ids]
        for _ in range(num_drafts):
            logits = torch.cat([rows(DRAFT, tokens, 1) for tokens in known])
            groups = [
                row_group(sampling, tokens, 1) for sampling, tokens in zip(samplings, known, strict=True)
            ]
            for index, token in enumerate(sampler.draw(logits, groups)):
                known[index].append(token.token_id)
                if token.probs is not None:
                    probs[index].append(token.probs)
        return [
            (tokens[len(before) :], each)
            for tokens, before, each in zip(known, token_ids, probs, strict=True)
        ]

    return propose


def fixed_draft(token_ids: list[list[int]], samplings: list[SamplingParams], num_drafts: int) -> list[Drafts]:
    """Tokens chosen without randomness, as an n-gram proposer does."""
    return [([(tokens[-1] + 1) % VOCAB_SIZE] * num_drafts, []) for tokens in token_ids]


def real(noise: NoiseSource, *, on_device: bool = False) -> Verify:
    if on_device:
        sampler = DeviceSampler(Kernels(), 64)
        return lambda step, rounds: sampler.verify(step.plain, rounds)
    return lambda step, rounds: verify_rounds(step.processed, rounds, noise)


@functools.cache
def outputs_on_cpu(sampling: SamplingParams, num_drafts: int, support: int | None) -> list[tuple[int, ...]]:
    """Two output tokens of each seed, drafted and verified on the CPU; support None: of fixed drafts."""
    noise = NoiseSource(VOCAB_SIZE)
    propose = fixed_draft if support is None else sampled_draft(noise, support=support)
    samplings = [replace(sampling, seed=seed) for seed in range(NUM_SAMPLES)]
    return generate(samplings, 2, num_drafts, propose, real(noise))


CASES: dict[str, tuple[SamplingParams, int, int | None]] = {
    "plain-1": (PLAIN, 1, 64),
    "plain-2": (PLAIN, 2, 64),
    "plain-one hot": (PLAIN, 2, None),
    "processed-1": (PROCESSED, 1, 64),
    "processed-2": (PROCESSED, 2, 64),
    "processed-one hot": (PROCESSED, 2, None),
    "truncated": (PROCESSED, 2, 2),
    "coupled-0": (COUPLED, 0, 64),
    "coupled-2": (COUPLED, 2, 64),
}
"""Sampling, draft tokens of a round, and support of their distribution; None: they are one-hot."""


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_distributed_as_the_targets(name: str) -> None:
    sampling, num_drafts, support = CASES[name]
    assert p_value(sampling, outputs_on_cpu(sampling, num_drafts, support)) > SIGNIFICANCE


@pytest.mark.parametrize("name", CASES)
def test_device_commits_what_the_cpu_does(noise: NoiseSource, name: str) -> None:
    sampling, num_drafts, support = CASES[name]
    samplings = [replace(sampling, seed=seed) for seed in range(NUM_COMPARED)]
    on_cpu = outputs_on_cpu(sampling, num_drafts, support)[:NUM_COMPARED]
    propose = fixed_draft if support is None else sampled_draft(noise, support=support, on_device=True)
    assert generate(samplings, 2, num_drafts, propose, real(noise, on_device=True)) == on_cpu
    assert len(set(on_cpu)) > 1


def test_coupled_output_equals_target_only_draws(noise: NoiseSource) -> None:
    """Wherever draft and target draw."""
    samplings = [replace(COUPLED, seed=seed) for seed in range(200)]
    alone = generate(samplings, 6, 0, fixed_draft, real(noise))
    on_cpu, on_device = real(noise), real(noise, on_device=True)
    for num_drafts in (1, 2, 5):
        for propose in (sampled_draft(noise), fixed_draft):
            assert generate(samplings, 6, num_drafts, propose, on_cpu) == alone
    drafted_there = sampled_draft(noise, on_device=True)
    for propose, verify in ((fixed_draft, on_device), (drafted_there, on_device), (drafted_there, on_cpu)):
        assert generate(samplings, 6, 2, propose, verify) == alone


def test_residual_rule_on_coupled_drafts_would_fail(noise: NoiseSource) -> None:
    """The noise that drew the draft token also draws the recovered one, and is no longer fresh."""

    def wrong_of(processed: torch.Tensor, item: Round) -> Verified:
        group = item.group
        verified = verify_rejection(
            processed,
            item.draft_token_ids,
            (),
            noise=noise,
            seed=group.sampling.seed,
            first_position=group.first_position,
        )
        position = group.first_position + verified.num_accepted_tokens
        weights = processed[verified.num_accepted_tokens].double().softmax(-1)
        if verified.num_accepted_tokens < len(item.draft_token_ids):
            weights[item.draft_token_ids[verified.num_accepted_tokens]] = 0.0
        gumbel = noise.gumbel([NoiseKey(group.sampling.seed, position, Purpose.COUPLED_DRAW)])[0]
        return verified._replace(next_token_id=int((weights.log() + gumbel).argmax()))

    def wrong(step: StepRows, rounds: list[Round]) -> list[Verified]:
        parts = step.processed.split([item.group.num_rows for item in rounds])
        return [wrong_of(part, item) for part, item in zip(parts, rounds, strict=True)]

    coupled = sampled_draft(noise, verification=Verification.COUPLED)
    assert p_value_of(PLAIN, 1, coupled, wrong, 2 * NUM_SAMPLES) < SIGNIFICANCE


def test_another_distribution_than_the_drafts_would_fail(noise: NoiseSource) -> None:
    """The draft samples its processed distribution and claims a flat one."""
    propose = sampled_draft(noise)
    flat = SparseProbs(tuple(range(VOCAB_SIZE)), (1.0 / VOCAB_SIZE,) * VOCAB_SIZE)

    def claim_flat(
        token_ids: list[list[int]], samplings: list[SamplingParams], num_drafts: int
    ) -> list[Drafts]:
        proposed = propose(token_ids, samplings, num_drafts)
        return [(drafts, [flat] * len(probs)) for drafts, probs in proposed]

    assert p_value_of(PLAIN, 1, claim_flat, real(noise), 500) < SIGNIFICANCE
