"""A checkpoint in PARD's layout: an ordinary model whose config.json names a mask token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specray.config import Config, DraftConfig, TargetConfig
from specray.draft_tokens import DraftTokens
from specray.engine.build import build_draft_engine
from specray.engine.drafting.engine import DraftEngine
from specray.engine.preflight import check_model, check_pair
from specray.engine.sampling.draft import DraftSampler
from specray.engine.sampling.noise import NoiseSource
from specray.errors import ConfigError
from specray.types import Outcomes, Proposal, SamplingParams, SpeculateItem, Verification
from tests.unit.engine.model.checkpoints import (
    VOCAB_SIZE,
    change_config,
    reference_logits,
    reference_model,
    write_checkpoint,
)
from tests.unit.engine.sampling.rows import row_group

MASK = 95
PROMPT = [5, 17, 93, 40, 2, 61]
SAMPLINGS = [
    SamplingParams(temperature=0.0, num_prompt_tokens=len(PROMPT)),
    SamplingParams(seed=7, num_prompt_tokens=len(PROMPT)),
    SamplingParams(seed=7, num_prompt_tokens=len(PROMPT), verification=Verification.REJECTION),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of the decoder, one with a sliding window, and one that the library runs."""
    root = tmp_path_factory.mktemp("pard")
    names = ("qwen2", "mistral-windowed", "gpt_neox")
    return {name: with_mask(write_checkpoint(root / name, name), MASK) for name in names}


def with_mask(directory: Path, token_id: object) -> Path:
    """Says in config.json which token is the mask."""
    change_config(directory, pard_token=token_id)
    return directory


def draft_of(model: Path, **values: Any) -> DraftEngine:
    options = {"dtype": "float32", "num_threads": 1, "profile_s": 0, "max_model_len": 64, "max_num_seqs": 2}
    return build_draft_engine(Config(draft=DraftConfig(model=str(model), **{**options, **values})))


def reference_proposal(model: Any, prefix: list[int], sampling: SamplingParams, count: int) -> DraftTokens:
    """One plain forward over the tokens and the masks behind them: the last row and those of masks count."""
    logits = reference_logits(model, [*prefix, *[MASK] * (count - 1)])[len(prefix) - 1 :]
    tokens = list(prefix)
    probs = []
    for row in logits:
        [drawn] = DraftSampler(NoiseSource(VOCAB_SIZE)).draw(row[None], [row_group(sampling, tokens, 1)])
        assert drawn is not None
        tokens.append(drawn.token_id)
        probs += [] if drawn.probs is None else [drawn.probs]
    return DraftTokens(tuple(tokens[len(prefix) :]), probs=tuple(probs))


def assert_same(found: DraftTokens, expected: DraftTokens) -> None:
    """The same tokens, from the same distributions but for rounding."""
    assert found.token_ids == expected.token_ids
    for one, other in zip(found.probs, expected.probs, strict=True):
        by_token = dict(zip(one.token_ids, one.probs, strict=True))
        assert by_token == pytest.approx(dict(zip(other.token_ids, other.probs, strict=True)), abs=1e-5)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["qwen2", "mistral-windowed", "gpt_neox"])
def test_a_mask_token_in_the_configuration_makes_a_draft_of_one_forward(
    name: str, sampling: SamplingParams, checkpoints: dict[str, Path]
) -> None:
    """Its proposals over some rounds, and its outcomes, are those of plain forwards without a cache."""
    model = reference_model(checkpoints[name])
    draft = draft_of(checkpoints[name])
    told, prefix = 0, list(PROMPT)
    for round_id in range(5):
        item = SpeculateItem("a", round_id, told, tuple(prefix[told:]), 6, sampling=sampling)
        [proposal] = draft.speculate([item]).replies
        assert isinstance(proposal, Proposal)
        expected = reference_proposal(model, prefix, sampling, 6)
        assert_same(proposal.draft, expected)
        told = len(prefix)
        ahead = SpeculateItem("a", round_id, told, (), 4, expected.token_ids[:2], (2, 1, 2))
        [reply] = draft.speculate([ahead]).replies
        assert isinstance(reply, Outcomes) and len(reply.branches) == 5
        for branch in reply.branches:
            following = [*expected.token_ids[: branch.num_accepted_tokens], branch.next_token_id]
            assert_same(branch.draft, reference_proposal(model, prefix + following, sampling, 4))
        prefix += [*expected.token_ids[: round_id % 3], (11 * round_id + 3) % VOCAB_SIZE]
    draft.check_integrity()


@pytest.mark.parametrize("token_id", [-1, 96, 3.5, "w3"])
def test_a_mask_that_is_no_token_is_refused_by_name(token_id: object, tmp_path: Path) -> None:
    directory = with_mask(write_checkpoint(tmp_path / "model", "qwen2"), token_id)
    with pytest.raises(ConfigError, match=rf"pard_token is {token_id}; allowed: 0\.\.95"):
        check_model(DraftConfig(model=str(directory)), "draft")


def test_a_model_without_masks_predicts_each_token_behind_the_one_before(tmp_path: Path) -> None:
    directory = with_mask(write_checkpoint(tmp_path / "model", "qwen2"), None)
    [proposal] = (
        draft_of(directory)
        .speculate([SpeculateItem("a", 1, 0, tuple(PROMPT), 4, sampling=SAMPLINGS[0])])
        .replies
    )
    assert isinstance(proposal, Proposal)
    tokens = list(PROMPT)
    for _ in range(4):
        tokens.append(int(reference_logits(reference_model(directory), tokens)[-1].argmax()))
    assert proposal.draft.token_ids == tuple(tokens[len(PROMPT) :])


def test_a_draft_of_a_draft_with_masks_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"draft\.draft is 'ngram' .* pard_token"):
        draft_of(checkpoints["qwen2"], draft="ngram")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("inner", ["ngram", "other", "masks"])
def test_a_draft_of_the_draft_is_loaded_beside_it_and_changes_no_proposal(
    inner: str, sampling: SamplingParams, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "model", "qwen3")
    other = write_checkpoint(tmp_path / "other", "llama")
    name = {"ngram": "ngram", "other": str(other), "masks": str(checkpoints["mistral-windowed"])}[inner]
    alone, cascade = draft_of(directory), draft_of(directory, draft=name)
    told, prefix = 0, [*PROMPT, *PROMPT]
    for round_id in range(5):
        item = SpeculateItem("a", round_id, told, tuple(prefix[told:]), 6, sampling=sampling)
        [expected], [found] = alone.speculate([item]).replies, cascade.speculate([item]).replies
        assert isinstance(expected, Proposal) and isinstance(found, Proposal)
        assert_same(found.draft, expected.draft)
        told = len(prefix)
        prefix += [*expected.draft.token_ids[: round_id % 4], 3]
    cascade.check_integrity()
    cascade.close()


def test_a_draft_of_the_draft_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "qwen2")
    other = write_checkpoint(tmp_path / "other", "qwen2", vocab_size=48)
    with pytest.raises(ConfigError, match=r"draft\.draft is '.*other', which has another tokenizer"):
        draft_of(directory, draft=str(other))
    target = TargetConfig(model=str(directory))
    with pytest.raises(ConfigError, match=r"draft\.draft: .*other has another tokenizer than the draft"):
        check_pair(target, DraftConfig(model=str(directory), draft=str(other)))
    check_pair(target, DraftConfig(model=str(directory), draft=str(directory)))
