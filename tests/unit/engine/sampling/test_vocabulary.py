"""A trimmed vocabulary draws and ranks what the whole one would, were all other tokens impossible."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specray.engine.sampling import draws as draws_module
from specray.engine.sampling.device.kernels import Kernels
from specray.engine.sampling.device.sampler import DeviceSampler
from specray.engine.sampling.sampler import CpuSampler, Sampler, WholeRows
from specray.engine.sampling.state import RowGroup
from specray.engine.sampling.vocabulary import TrimmedVocabulary
from specray.types import SamplingParams, Verification
from tests.unit.engine.sampling.rows import row_group

CPU = torch.device("cpu")
VOCAB_SIZE = 300
IDS = np.sort(np.random.default_rng(0).choice(VOCAB_SIZE, 41, replace=False)).astype(np.int64)
KNOWN, UNKNOWN = int(IDS[5]), int(np.setdiff1d(np.arange(VOCAB_SIZE), IDS)[7])
PREFIX = [KNOWN, UNKNOWN, int(IDS[9]), KNOWN, int(IDS[30])]
COUPLED = SamplingParams(seed=77, num_prompt_tokens=2)
GREEDY = replace(COUPLED, temperature=0.0)
PENALTIES = replace(
    COUPLED,
    temperature=0.8,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias=((KNOWN, 2.0), (UNKNOWN, 50.0), (int(IDS[20]), -100.0)),
    min_tokens=12,
    stop_token_ids=(int(IDS[0]), UNKNOWN),
)
REJECTION = replace(COUPLED, verification=Verification.REJECTION)
SAMPLINGS = {
    "greedy": GREEDY,
    "coupled": COUPLED,
    "top-k": replace(COUPLED, top_k=7),
    "top-k-of-all": replace(COUPLED, top_k=60),
    "top-p": replace(COUPLED, top_p=0.7, min_p=0.01),
    "penalties": PENALTIES,
    "penalties-greedy": replace(PENALTIES, temperature=0.0),
    "penalties-top-p": replace(PENALTIES, top_p=0.8),
    "bad-words": replace(COUPLED, bad_words=((int(IDS[3]),), (UNKNOWN,), (int(IDS[30]), int(IDS[4])))),
    "allowed": replace(COUPLED, allowed_token_ids=(KNOWN, UNKNOWN, int(IDS[11]), int(IDS[12]))),
    "rejection": REJECTION,
    "rejection-penalties": replace(PENALTIES, verification=Verification.REJECTION, top_k=5),
}


@pytest.fixture(params=["kernel", "torch", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "kernel":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(draws_module, "compiled_kernels", lambda: None)
    yield str(request.param)


def samplers(way: str) -> tuple[Sampler, Sampler]:
    """Over all tokens, and over some."""
    vocabulary = TrimmedVocabulary(IDS, vocab_size=VOCAB_SIZE, device=CPU)
    if way == "device":
        whole = DeviceSampler(Kernels(), 16)
        return whole, WholeRows(whole, VOCAB_SIZE, vocabulary)
    return CpuSampler(VOCAB_SIZE, 16), CpuSampler(VOCAB_SIZE, 16, vocabulary=vocabulary)


def rows(count: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all tokens, the unknown ones impossible; and of the known ones alone."""
    some = 2.0 * torch.randn(count, len(IDS), generator=torch.Generator().manual_seed(seed))
    whole = torch.full((count, VOCAB_SIZE), -math.inf)
    whole[:, IDS] = some
    return whole, some


def mask_of(*token_ids: int) -> NDArray[np.int32]:
    bits = np.zeros((1, 32 * (-(-VOCAB_SIZE // 32))), np.uint8)
    bits[0, list(token_ids)] = 1
    return np.packbits(bits, axis=-1, bitorder="little").view(np.int32)


def groups_of(sampling: SamplingParams, count: int) -> list[RowGroup]:
    """Rows at different positions, so that each has noise of its own."""
    return [row_group(sampling, PREFIX + [KNOWN] * n, 1) for n in range(count)]


@pytest.mark.parametrize("is_judged", [False, True])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_same_tokens_are_drawn(name: str, is_judged: bool, way: str) -> None:
    whole, trimmed = samplers(way)
    all_logits, logits = rows(40)
    groups = groups_of(SAMPLINGS[name], 40)
    before = logits.clone()
    expected = whole.draw(all_logits, groups, is_judged=is_judged)
    drawn = trimmed.draw(logits, groups, is_judged=is_judged)
    assert torch.equal(logits, before)
    for one, other in zip(drawn, expected, strict=True):
        assert one is not None and other is not None
        assert (one.token_id, one.probs) == (other.token_id, other.probs)
        # The kernel's leads are approximate, by other tokens at other places.
        assert one.logprob == pytest.approx(other.logprob, abs=0.1 if way == "kernel" else 1e-5)
    assert len({token.token_id for token in drawn if token is not None}) > 2


@pytest.mark.parametrize("name", SAMPLINGS)
def test_same_next_tokens_are_ranked(name: str, way: str) -> None:
    whole, trimmed = samplers(way)
    all_logits, logits = rows(12)
    group = row_group(SAMPLINGS[name], [*PREFIX, *IDS[:11].tolist()], 12)
    excluded = [int(token_id) for token_id in IDS[:11]] + [None]
    expected = whole.rank(all_logits, [group], [3] * 12, excluded)
    ranked = trimmed.rank(logits, [group], [3] * 12, excluded)
    for one, other in zip(ranked, expected, strict=True):
        assert [token_id for token_id, _ in one.next_tokens] == [
            token_id for token_id, _ in other.next_tokens
        ]
        assert [value for _, value in one.next_tokens] == pytest.approx(
            [value for _, value in other.next_tokens], abs=1e-5
        )
        assert one.excluded_logprob == pytest.approx(other.excluded_logprob, abs=1e-5)


@pytest.mark.parametrize("name", ["greedy", "coupled", "penalties", "rejection"])
def test_grammar_masks_are_by_token_id(name: str, way: str) -> None:
    whole, trimmed = samplers(way)
    all_logits, logits = rows(3)
    allowed = (KNOWN, UNKNOWN, int(IDS[-1]))
    groups = [replace(group, token_masks=mask_of(*allowed)) for group in groups_of(SAMPLINGS[name], 3)]
    expected = whole.draw(all_logits, groups)
    assert trimmed.draw(logits, groups) == expected
    assert {token.token_id for token in expected if token is not None} <= {KNOWN, int(IDS[-1])}


@pytest.mark.parametrize("name", ["greedy", "coupled", "rejection"])
def test_row_without_a_possible_token_draws_none_and_leaves_its_neighbours_alone(name: str, way: str) -> None:
    _, trimmed = samplers(way)
    _, logits = rows(3)
    groups = groups_of(SAMPLINGS[name], 3)
    free = trimmed.draw(logits, groups, is_judged=True)
    groups[1] = replace(groups[1], token_masks=mask_of(UNKNOWN))
    drawn = trimmed.draw(logits, groups, is_judged=True)
    assert drawn[1] is None
    assert drawn[::2] == free[::2]
    [ranked] = trimmed.rank(logits[1:2], groups[1:2], [3], [KNOWN])
    assert ranked.next_tokens == []


def test_of_equally_likely_tokens_the_lowest_id_is_drawn() -> None:
    _, trimmed = samplers("kernel")
    [token] = trimmed.draw(torch.zeros(1, len(IDS)), groups_of(GREEDY, 1))
    assert token is not None and token.token_id == IDS[0]
