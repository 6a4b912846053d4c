"""Each processor against a naive one that looks at one row and its own prefix at a time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specray.engine.sampling.processors import keep_top, process_logits
from specray.types import SamplingParams
from tests.unit.engine.sampling.rows import row_group

VOCAB_SIZE = 50
PROMPT = [3, 4, 3, 9]
OUTPUT = [5, 9, 5, 7, 8, 5]
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=20,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=-0.3,
    logit_bias=((5, 2.0), (11, -100.0)),
    min_tokens=4,
    stop_token_ids=(2, 6),
    num_prompt_tokens=len(PROMPT),
)


def naive(row: torch.Tensor, sampling: SamplingParams, prefix: list[int]) -> list[float]:
    """All processors on one row, in plain Python."""
    logits = row.double().tolist()
    output = Counter(prefix[sampling.num_prompt_tokens :])
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    for token_id in set(prefix):
        penalty = sampling.repetition_penalty
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    for token_id, count in output.items():
        logits[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if sampling.allowed_token_ids:
        logits = [
            logit if token_id in sampling.allowed_token_ids else -math.inf
            for token_id, logit in enumerate(logits)
        ]
    if len(prefix) - sampling.num_prompt_tokens < sampling.min_tokens:
        for token_id in sampling.stop_token_ids:
            logits[token_id] = -math.inf
    written = prefix[sampling.num_prompt_tokens :]
    banned = {
        word[-1] for word in sampling.bad_words if written[len(written) - len(word) + 1 :] == [*word[:-1]]
    }
    if any(logit > -math.inf for token_id, logit in enumerate(logits) if token_id not in banned):
        logits = [-math.inf if token_id in banned else logit for token_id, logit in enumerate(logits)]
    if sampling.temperature == 0.0:
        return logits
    logits = [logit / sampling.temperature for logit in logits]
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = {token_id: math.exp(logits[token_id]) for token_id in kept}
    total, reached, nucleus = sum(weights.values()), 0.0, []
    for token_id in kept:
        if reached < sampling.top_p or sampling.top_p == 1.0:
            nucleus.append(token_id)
        reached += weights[token_id] / total
    likeliest = logits[order[0]]
    return [
        logit
        if token_id in nucleus and (not sampling.min_p or logit >= likeliest + math.log(sampling.min_p))
        else -math.inf
        for token_id, logit in enumerate(logits)
    ]


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(num_rows, VOCAB_SIZE, generator=generator)


def changed(**values: Any) -> SamplingParams:
    return SamplingParams(num_prompt_tokens=len(PROMPT), **values)


@pytest.mark.parametrize(
    "sampling",
    [
        changed(temperature=0.5),
        changed(logit_bias=((5, 1.5), (6, -100.0))),
        changed(repetition_penalty=1.5),
        changed(repetition_penalty=0.5),
        changed(presence_penalty=1.0),
        changed(frequency_penalty=0.5),
        changed(min_tokens=3, stop_token_ids=(5, 7)),
        changed(min_tokens=100, stop_token_ids=(5,)),
        changed(allowed_token_ids=(3, 8, 9)),
        changed(allowed_token_ids=(3,), bad_words=((3,),)),
        changed(temperature=0.0, allowed_token_ids=(1, 8, 9)),
        changed(bad_words=((4,), (9,))),
        changed(bad_words=tuple((*OUTPUT[:count], 7) for count in range(len(OUTPUT) + 1))),
        changed(bad_words=((PROMPT[-1], 7), (PROMPT[-1], OUTPUT[0], 8))),
        changed(temperature=0.0, bad_words=((OUTPUT[-1], 5), (OUTPUT[-2], OUTPUT[-1], 6))),
        changed(top_k=1),
        changed(top_k=7),
        changed(top_k=500),
        changed(top_p=1e-9),
        changed(top_p=0.5),
        changed(top_p=0.999),
        changed(top_k=9, top_p=0.8),
        changed(min_p=0.1),
        changed(min_p=1.0),
        changed(temperature=0.0, repetition_penalty=1.5, presence_penalty=1.0, top_k=3, top_p=0.5, min_p=0.5),
        EVERYTHING,
    ],
)
def test_row_j_has_the_state_of_its_own_prefix(sampling: SamplingParams) -> None:
    token_ids, num_rows = PROMPT + OUTPUT, 6
    logits = random_logits(num_rows)
    before = logits.clone()
    processed = process_logits(logits, [row_group(sampling, token_ids, num_rows)])
    for row in range(num_rows):
        prefix = token_ids[: len(token_ids) - num_rows + 1 + row]
        expected = torch.tensor(naive(logits[row], sampling, prefix))
        torch.testing.assert_close(processed[row], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)


def test_rows_that_begin_within_the_prompt() -> None:
    """Prompt tokens count for the repetition penalty alone, also where the rows themselves cross them."""
    sampling = replace(EVERYTHING, top_k=0, top_p=1.0, min_p=0.0)
    token_ids = PROMPT + OUTPUT[:2]
    logits = random_logits(5)
    processed = process_logits(logits, [row_group(sampling, token_ids, 5)])
    for row in range(5):
        expected = torch.tensor(naive(logits[row], sampling, token_ids[: 2 + row]))
        torch.testing.assert_close(processed[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sampling", "processor"),
    [
        (changed(repetition_penalty=1.7), RepetitionPenaltyLogitsProcessor(1.7)),
        (changed(top_k=6), TopKLogitsWarper(6)),
        (changed(top_p=0.7), TopPLogitsWarper(0.7)),
        (changed(min_p=0.05), MinPLogitsWarper(0.05)),
    ],
)
def test_meaning_is_that_of_transformers(sampling: SamplingParams, processor: LogitsProcessor) -> None:
    token_ids = PROMPT + OUTPUT
    for seed in range(5):
        logits = random_logits(1, seed)
        processed = process_logits(logits, [row_group(sampling, token_ids, 1)])
        expected = processor(torch.tensor([token_ids]), logits.clone())
        torch.testing.assert_close(processed, expected)


def test_mixed_batch_equals_each_group_alone() -> None:
    groups = [
        row_group(EVERYTHING, PROMPT + OUTPUT, 3),
        row_group(SamplingParams(temperature=0.0), PROMPT, 1),
        row_group(SamplingParams(temperature=2.0), PROMPT + OUTPUT, 2),
    ]
    logits = random_logits(6)
    batched = process_logits(logits, groups)
    parts = [logits[:3], logits[3:4], logits[4:]]
    alone = [process_logits(rows, [group]) for rows, group in zip(parts, groups, strict=True)]
    assert torch.equal(batched, torch.cat(alone))


def test_plain_groups_with_different_temperatures() -> None:
    logits = random_logits(3)
    groups = [row_group(SamplingParams(temperature=0.5), PROMPT, 2), row_group(SamplingParams(), PROMPT, 1)]
    expected = torch.cat([logits[:2] / 0.5, logits[2:]])
    assert torch.equal(process_logits(logits, groups), expected)


class DividesLikeCuda(TorchDispatchMode):
    """A division by a number is there a product with its reciprocal; one by a tensor is not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):
            return args[0] * (1.0 / torch.tensor(args[1], dtype=args[0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("beside", [0.7, 0.9, 1.0, 0.0])
def test_no_bit_of_a_row_depends_on_the_temperature_beside_it(beside: float) -> None:
    logits = random_logits(3)
    group = row_group(SamplingParams(temperature=0.7), PROMPT, 2)
    neighbour = row_group(SamplingParams(temperature=beside), PROMPT, 1)
    expected = logits[:2] / torch.tensor([[0.7], [0.7]])
    with DividesLikeCuda():
        assert not torch.equal(logits[:2] / 0.7, expected)
        alone = process_logits(logits[:2], [group])
        in_company = process_logits(logits, [group, neighbour])[:2]
    assert torch.equal(alone, expected)
    assert torch.equal(in_company, expected)


def test_greedy_without_processors_is_untouched() -> None:
    logits = random_logits(2)
    sampling = SamplingParams(temperature=0.0, top_k=1, top_p=0.1)
    assert process_logits(logits, [row_group(sampling, PROMPT, 2)]) is logits


def test_tiny_temperature_stays_finite() -> None:
    processed = process_logits(random_logits(1), [row_group(SamplingParams(temperature=1e-40), PROMPT, 1)])
    assert bool(processed.isfinite().all())


def test_ties_keep_the_lower_token_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    kept = keep_top(logits, top_k=3).isfinite()
    assert kept.tolist() == [[True, True, False, True, False], [True, True, True, False, False]]
    kept = keep_top(logits[1:], top_p=0.5).isfinite()
    assert kept.tolist() == [[True, True, True, False, False]]


def test_nucleus_wider_than_the_first_attempt() -> None:
    """Flat rows need more than the likeliest tokens tried at first; peaked rows beside them do not."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 2000, generator=generator) * torch.tensor([[0.1], [8.0], [1.0]])
    together = keep_top(logits, top_p=0.9)
    for row in range(3):
        order = logits[row].sort(descending=True, stable=True).indices
        before = logits[row].double().softmax(-1)[order].cumsum(-1) - logits[row].double().softmax(-1)[order]
        expected = set(order[before < 0.9].tolist())
        assert set(together[row].isfinite().nonzero().flatten().tolist()) == expected
        assert torch.equal(keep_top(logits[row : row + 1], top_p=0.9)[0], together[row])


def test_tokens_beyond_a_smaller_vocabulary_are_skipped() -> None:
    sampling = SamplingParams(
        temperature=0.0, logit_bias=((VOCAB_SIZE, 5.0),), min_tokens=9, stop_token_ids=(VOCAB_SIZE + 3,)
    )
    logits = random_logits(1)
    assert torch.equal(process_logits(logits, [row_group(sampling, PROMPT, 1)]), logits)
