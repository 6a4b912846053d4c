"""A step copies once to the device and once from it, whatever its parameters, and never waits in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specray.draft_tokens import SparseProbs
from specray.engine.sampling.device.kernels import Kernels
from specray.engine.sampling.device.sampler import DeviceSampler
from specray.engine.sampling.sampler import CpuSampler
from specray.engine.sampling.state import RowGroup, SamplingState, chain_rows
from specray.engine.sampling.verify import Round
from specray.types import SamplingParams, Verification
from tests.unit.engine.sampling.device.recording import DEVICE, Recording, Remote

VOCAB_SIZE = 64
PENALISED = SamplingParams(
    seed=3,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((5, 1.0),),
    bad_words=((7,),),
    min_tokens=9,
    stop_token_ids=(2,),
    allowed_token_ids=tuple(range(40)),
    num_prompt_tokens=2,
)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(seed=1),
    "top-k": SamplingParams(seed=2, top_k=9),
    "top-p": SamplingParams(seed=2, temperature=0.7, top_p=0.9, min_p=0.01),
    "penalised": PENALISED,
    "rejection": SamplingParams(seed=4, verification=Verification.REJECTION),
    "rejection-processed": replace(PENALISED, top_p=0.8, verification=Verification.REJECTION),
}
DRAFTS = (5, 9, 5)
ONCE_EACH_WAY = {"in": 1, "out": 1}


def groups_of(sampling: SamplingParams, drafts: tuple[int, ...], masks: Any = None) -> list[RowGroup]:
    states = [SamplingState(replace(sampling, seed=seed), [4, 5, 6, 5]) for seed in range(3)]
    return [chain_rows(state, drafts, token_masks=masks) for state in states]


def logits_of(num_rows: int) -> torch.Tensor:
    return 2.0 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(num_rows))


def uniform_probs(count: int) -> tuple[SparseProbs, ...]:
    return (SparseProbs(tuple(range(10)), (0.1,) * 10),) * count


@pytest.mark.parametrize("name", SAMPLINGS)
def test_verify(name: str) -> None:
    groups = groups_of(SAMPLINGS[name], DRAFTS)
    probs = uniform_probs(len(DRAFTS)) if SAMPLINGS[name].draws_by_rejection else ()
    rounds = [Round(group, DRAFTS, probs) for group in groups]
    logits = logits_of(12)
    with Recording() as recording:
        verdicts = DeviceSampler(Kernels(), 8).verify(Remote(logits), rounds)
    assert recording.counts == ONCE_EACH_WAY
    assert verdicts == CpuSampler(VOCAB_SIZE).verify(logits, rounds)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_draw(name: str) -> None:
    groups, logits = groups_of(SAMPLINGS[name], ()), logits_of(3)
    with Recording() as recording:
        drawn = DeviceSampler(Kernels(), 8).draw(Remote(logits), groups, is_judged=True)
    assert recording.counts == ONCE_EACH_WAY
    expected = CpuSampler(VOCAB_SIZE, 8).draw(logits, groups)
    assert [token.token_id for token in drawn] == [token.token_id for token in expected]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_rank(name: str) -> None:
    groups, logits = groups_of(SAMPLINGS[name], DRAFTS), logits_of(12)
    with Recording() as recording:
        ranked = DeviceSampler(Kernels(), 8).rank(Remote(logits), groups, [2] * 12, [None] * 12)
    assert recording.counts == ONCE_EACH_WAY
    expected = CpuSampler(VOCAB_SIZE).rank(logits, groups, [2] * 12, [None] * 12)
    assert [[token for token, _ in row.next_tokens] for row in ranked] == [
        [token for token, _ in row.next_tokens] for row in expected
    ]


def test_mixed_rules_and_a_grammar() -> None:
    masks = np.full((4, VOCAB_SIZE // 32), 0x0F0F0F0F, np.int32)
    groups = [groups_of(sampling, DRAFTS)[0] for sampling in SAMPLINGS.values()]
    groups += groups_of(SAMPLINGS["top-p"], DRAFTS, masks)
    rounds = [Round(group, DRAFTS, ()) for group in groups]
    logits = logits_of(4 * len(groups))
    with Recording() as recording:
        verdicts = DeviceSampler(Kernels(), 8).verify(Remote(logits), rounds)
    assert recording.counts == ONCE_EACH_WAY
    assert verdicts == CpuSampler(VOCAB_SIZE).verify(logits, rounds)


def test_the_recording_sees_what_crosses_over() -> None:
    with Recording() as recording:
        remote = torch.arange(4.0).to(DEVICE)
        remote = remote + torch.ones(4, device=DEVICE)
        assert remote.cpu().tolist() == [1.0, 2.0, 3.0, 4.0]
        assert remote[2].item() == 3.0
        assert bool((remote > 2.0).any())
        assert remote[remote > 2.0].cpu().tolist() == [3.0, 4.0]
    assert recording.counts == {"in": 1, "out": 2, "_local_scalar_dense": 2, "index by truth values": 1}
