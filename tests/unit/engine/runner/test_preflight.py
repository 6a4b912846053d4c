"""A pair is accepted where both mean the same strings by their token ids, however wide their weights are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch

from specray.config import Config, DraftConfig, TargetConfig
from specray.engine.build import build_draft_engine
from specray.engine.model.decoder_config import HEAD
from specray.engine.preflight import check_pair
from specray.errors import ConfigError
from specray.types import Proposal, SamplingParams, SpeculateItem
from tests.unit.engine.model.checkpoints import changing_tensors, write_checkpoint, write_tokenizer

NUM_WORDS = 90


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Of equal tokenizers, by the width of their weights."""
    root = tmp_path_factory.mktemp("models")
    paths = {}
    for width in (90, 96, 128):
        paths[width] = write_checkpoint(root / str(width), "qwen3", vocab_size=width)
        write_tokenizer(paths[width], NUM_WORDS)
    return paths


@pytest.mark.parametrize(("target", "draft"), [(96, 128), (128, 96), (90, 128), (96, 90)])
def test_padding_may_differ(target: int, draft: int, models: dict[int, Path]) -> None:
    check_pair(TargetConfig(model=str(models[target])), DraftConfig(model=str(models[draft])))


@pytest.mark.parametrize(
    ("vocabulary", "overlap"),
    [
        (
            "same",
            "90 of 92 token ids mean the same string; the first that does not is 90, 'w90' in the draft and "
            "unknown in the target; allowed: the same vocabulary",
        ),
        (
            "auto",
            "90 of the draft's 92 tokens are the target's as well; allowed with draft.vocabulary 'auto': the "
            "same vocabulary, or two tokenizers that can write any text",
        ),
    ],
)
def test_another_tokenizer_is_refused_with_the_overlap(
    vocabulary: Literal["same", "auto"], overlap: str, models: dict[int, Path], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "qwen3", vocab_size=96)
    write_tokenizer(tmp_path, NUM_WORDS + 2)
    target = TargetConfig(model=str(models[96]))
    with pytest.raises(ConfigError) as caught:
        check_pair(target, DraftConfig(model=str(tmp_path), vocabulary=vocabulary))
    assert str(caught.value) == (
        f"draft.model: {tmp_path} has another tokenizer than the target {models[96]}: {overlap}"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_never_proposes_its_padding(
    temperature: float, models: dict[int, Path], tmp_path: Path
) -> None:
    """However likely: its rows for padding ids make them the likeliest everywhere."""
    shutil.copytree(models[128], tmp_path, dirs_exist_ok=True)
    with changing_tensors(tmp_path) as tensors:
        tensors[HEAD][NUM_WORDS:] = 100.0 * torch.randn(128 - NUM_WORDS, 32)
    options = {"dtype": "float32", "num_threads": 1, "profile_s": 0, "max_model_len": 32, "max_num_seqs": 2}
    item = SpeculateItem(
        "a", 1, 0, (5, 17, 93, 120), 8, sampling=SamplingParams(temperature=temperature, num_prompt_tokens=4)
    )
    proposals = []
    for path in (tmp_path, models[128]):
        draft = build_draft_engine(Config(draft=DraftConfig(model=str(path), **options)))
        [reply] = draft.speculate([item]).replies
        assert isinstance(reply, Proposal) and max(reply.draft.token_ids) < NUM_WORDS
        proposals.append(reply)
    assert proposals[0] == proposals[1]
    assert len(proposals[0].draft) == 8
