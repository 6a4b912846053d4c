"""The verification rules on hand-made rows: where acceptance stops, and what follows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from specray.draft_tokens import SparseProbs
from specray.engine.sampling.draft import DraftSampler
from specray.engine.sampling.logprobs import token_logprobs
from specray.engine.sampling.noise import NoiseKey, NoiseSource, Purpose
from specray.engine.sampling.verify import (
    Round,
    Verified,
    accept_equal,
    verify_rejection,
    verify_rounds,
)
from specray.types import SamplingParams, Verification
from tests.unit.engine.sampling.rows import row_group

VOCAB_SIZE = 8
NOISE = NoiseSource(VOCAB_SIZE)
GREEDY = SamplingParams(temperature=0.0)
BY_REJECTION = SamplingParams(seed=3, verification=Verification.REJECTION)


def rows_with_argmax(*token_ids: int) -> torch.Tensor:
    logits = torch.zeros(len(token_ids), VOCAB_SIZE)
    for row, token_id in enumerate(token_ids):
        logits[row, token_id] = 4.0
    return logits


def certain(*token_ids: int) -> torch.Tensor:
    """Rows that allow one token each."""
    logits = torch.full((len(token_ids), VOCAB_SIZE), -torch.inf)
    for row, token_id in enumerate(token_ids):
        logits[row, token_id] = 0.0
    return logits


def one_hot(*token_ids: int) -> tuple[SparseProbs, ...]:
    return tuple(SparseProbs((token_id,), (1.0,)) for token_id in token_ids)


def verify(
    logits: torch.Tensor, drafts: Sequence[int], sampling: SamplingParams, *, first_position: int = 5
) -> Verified:
    """One round without draft distributions, whose row 0 predicts the token at ``first_position``."""
    group = row_group(sampling, [0] * first_position + list(drafts), len(drafts) + 1)
    assert group.first_position == first_position
    [verified] = verify_rounds(logits, [Round(group, drafts, ())], NOISE)
    return verified


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ((3, 1, 4), Verified(3, 5)),  # perfect match: the bonus token follows
        ((2, 1, 4), Verified(0, 3)),  # first mismatch
        ((3, 1, 5), Verified(2, 4)),  # last mismatch
        ((3, 2, 4), Verified(1, 1)),  # a match behind a mismatch counts for nothing
    ],
)
def test_greedy(drafts: tuple[int, ...], expected: Verified) -> None:
    assert verify(rows_with_argmax(3, 1, 4, 5), drafts, GREEDY) == expected


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=1), BY_REJECTION])
def test_empty_draft_gives_the_target_token(sampling: SamplingParams) -> None:
    assert verify(certain(6), (), sampling) == Verified(0, 6)


def test_wrong_number_of_rows_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        accept_equal([1, 2], [1, 2])


def coupled_draws(logits: torch.Tensor, seed: int, first_position: int) -> list[int]:
    """The definition, one position at a time."""
    return [
        int((row + NOISE.gumbel([NoiseKey(seed, first_position + i, Purpose.COUPLED_DRAW)])[0]).argmax())
        for i, row in enumerate(logits)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_coupled_commits_the_targets_own_draws_whatever_is_drafted(seed: int) -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    own = coupled_draws(logits, seed, 11)
    sampling = SamplingParams(seed=seed)
    assert verify(logits, own[:3], sampling, first_position=11) == Verified(3, own[3])
    for wrong in range(3):
        drafts = [*own[:wrong], (own[wrong] + 1) % VOCAB_SIZE, *own[wrong + 1 : 3]]
        assert verify(logits, drafts, sampling, first_position=11) == Verified(wrong, own[wrong])


def test_coupled_never_draws_a_masked_token() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 2:] = -torch.inf
    drawn = {verify(logits, (), SamplingParams(seed=seed)).next_token_id for seed in range(50)}
    assert drawn == {0, 1}


def test_rejection_accepts_all_of_an_equal_distribution() -> None:
    """min(1, target / draft) is 1 everywhere."""
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    probs = logits[0].double().softmax(-1)
    draft = SparseProbs(tuple(range(VOCAB_SIZE)), tuple(probs.tolist()))
    for seed in range(40):
        verified = verify_rejection(
            logits, (seed % VOCAB_SIZE,), (draft,), noise=NOISE, seed=seed, first_position=2
        )
        assert verified.num_accepted_tokens == 1


def test_rejection_of_a_token_that_the_target_cannot_produce() -> None:
    rows = certain(3, 1, 4, 5)
    verified = verify_rejection(rows, (3, 2, 4), one_hot(3, 2, 4), noise=NOISE, seed=0, first_position=9)
    assert verified == Verified(1, 1)


@pytest.mark.parametrize(
    "probs",
    [SparseProbs((1, 2), (0.5, 0.5)), SparseProbs((0, 1, 2), (0.0, 0.5, 0.5))],
    ids=["absent", "zero"],
)
def test_draft_token_that_its_distribution_cannot_produce_is_rejected(probs: SparseProbs) -> None:
    """The residual still takes off what the distribution says, and nothing else."""
    logits = torch.tensor([[0.2, 0.5, 0.3, 0, 0, 0, 0, 0], [1.0] * VOCAB_SIZE]).log()
    for seed in range(30):
        verified = verify_rejection(logits, (0,), (probs,), noise=NOISE, seed=seed, first_position=2)
        assert verified == Verified(0, 0)


def test_rejection_without_draft_probs_never_recovers_the_rejected_token() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    rejected = 0
    for seed in range(60):
        verified = verify_rejection(logits, (4,), (), noise=NOISE, seed=seed, first_position=2)
        if verified.num_accepted_tokens == 0:
            rejected += 1
            assert verified.next_token_id != 4
    assert rejected > 40


@pytest.mark.parametrize("seed", range(40))
def test_rejection_uses_each_number_for_one_purpose(seed: int) -> None:
    """Draft draw, acceptance and residual draw by their definitions, each with noise of its own."""
    generator = torch.Generator().manual_seed(seed)
    draft_logits, target_logits = torch.randn(2, 1, VOCAB_SIZE, generator=generator)
    sampling = SamplingParams(seed=seed, verification=Verification.REJECTION)
    [token] = DraftSampler(NOISE).draw(draft_logits, [row_group(sampling, [0] * 6, 1)])

    def gumbel(purpose: Purpose) -> torch.Tensor:
        return NOISE.gumbel([NoiseKey(seed, 6, purpose)])[0]

    draft_probs, target_probs = draft_logits[0].softmax(-1).double(), target_logits[0].double().softmax(-1)
    assert token.token_id == int((draft_probs.log() + gumbel(Purpose.DRAFT_DRAW)).argmax())
    assert token.probs is not None
    verified = verify_rejection(
        torch.cat([target_logits, target_logits]),
        (token.token_id,),
        (token.probs,),
        noise=NOISE,
        seed=seed,
        first_position=6,
    )
    uniform = NOISE.uniform(NoiseKey(seed, 6, Purpose.ACCEPT_TEST))
    ratio = target_probs[token.token_id] / draft_probs[token.token_id]
    if uniform < ratio.item():
        bonus = target_probs.log() + NOISE.gumbel([NoiseKey(seed, 7, Purpose.RESIDUAL_DRAW)])[0]
        assert verified == Verified(1, int(bonus.argmax()))
    else:
        residual = (target_probs - draft_probs).clamp(min=0.0).log()
        assert verified == Verified(0, int((residual + gumbel(Purpose.RESIDUAL_DRAW)).argmax()))


def test_rejection_repeats_with_the_same_seed() -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    results = [
        [
            verify_rejection(logits, (1, 2, 3), (), noise=source, seed=seed, first_position=7)
            for seed in range(30)
        ]
        for source in (NOISE, NoiseSource(VOCAB_SIZE, max_cached_bytes=0))
    ]
    assert results[0] == results[1]
    assert len(set(results[0])) > 1


def test_mixed_batch_equals_each_round_alone() -> None:
    logits = torch.randn(10, VOCAB_SIZE, generator=torch.Generator().manual_seed(6))
    drafts = [(1, 2), (3,), (4, 5, 6), ()]
    samplings = [GREEDY, SamplingParams(seed=9), BY_REJECTION, SamplingParams(seed=4)]
    rounds = [
        Round(row_group(sampling, [0, 0, *tokens], len(tokens) + 1), tokens, ())
        for sampling, tokens in zip(samplings, drafts, strict=True)
    ]
    rows = [logits[:3], logits[3:5], logits[5:9], logits[9:]]
    expected = [
        accept_equal(rows[0].argmax(-1).tolist(), drafts[0]),
        accept_equal(coupled_draws(rows[1], 9, 2), drafts[1]),
        verify_rejection(rows[2], drafts[2], (), noise=NOISE, seed=3, first_position=2),
        accept_equal(coupled_draws(rows[3], 4, 2), ()),
    ]
    assert verify_rounds(logits, rounds, NOISE) == expected
    assert [
        verify_rounds(part, [item], NOISE)[0] for part, item in zip(rows, rounds, strict=True)
    ] == expected


def test_rejection_at_temperature_zero_is_greedy() -> None:
    sampling = SamplingParams(temperature=0.0, verification=Verification.REJECTION)
    item = Round(row_group(sampling, [0, 3, 1], 3), (3, 1), ())
    assert verify_rounds(rows_with_argmax(3, 1, 4), [item], NOISE) == [Verified(2, 4)]


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]]).log()
    first, second = token_logprobs(logits, [1, 3], 2)
    assert (first.token_id, first.top_token_ids[0]) == (1, 0)
    assert first.logprob == pytest.approx(-1.386294, abs=1e-6)
    assert first.top_logprobs == pytest.approx((-0.693147, -1.386294), abs=1e-6)
    assert second.top_token_ids == (3, 2)
    assert token_logprobs(logits, [1, 3], 0)[0].top_token_ids == ()
    assert len(token_logprobs(logits, [1, 3], 100)[0].top_token_ids) == 4
