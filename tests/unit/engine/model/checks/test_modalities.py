"""The text part of multimodal checkpoints: names as they are published, and what is dropped after loading."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.inputs import SequenceInput
from specray.engine.model.checks.modalities import drop_other_parts
from specray.engine.model.description import ModelArgs, describe
from specray.engine.runner.runner import ModelRunner
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import (
    changing_tensors,
    family_config,
    reference_logits,
    reference_model,
    write_family,
)
from tests.unit.engine.model.zoo import FAMILIES
from tests.unit.engine.runners import cpu_runner

PROMPT = [5, 7, 9, 11, 13, 2, 4, 60, 33]


def starts(directory: Path) -> set[str]:
    """What names of tensors start with, up to the parts of layers."""
    names = load_file(directory / "model.safetensors")
    return {".".join(name.split(".")[:2]) for name in names}


def rename(directory: Path, prefixes: dict[str, str]) -> None:
    """Gives tensors whose names start so other names."""
    with changing_tensors(directory) as tensors:
        for name in list(tensors):
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            tensors[prefixes.get(prefix, "") + name.removeprefix(prefix)] = tensors.pop(name)


MISTRAL = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
OTHER_PARTS = re.compile(r"vis(ion|ual)|projector")
QWEN = {"model.": "model.language_model.", "visual.": "model.visual."}


PUBLISHED = [
    # As of Mistral-Small-3.1 and Qwen2.5-VL, each followed by the names of the library's modules.
    ("mistral3", {"language_model.model", "language_model.lm_head"}, None),
    ("mistral3", {"model.language_model", "lm_head.weight"}, MISTRAL),
    ("qwen2_5_vl", {"model.layers", "model.embed_tokens", "model.norm", "lm_head.weight"}, None),
    ("qwen2_5_vl", {"model.language_model", "lm_head.weight"}, QWEN),
    # As of Qwen3.5.
    ("qwen3_5-multimodal", {"model.language_model", "lm_head.weight", "mtp.fc"}, {}),
]


def logits_of(runner: ModelRunner) -> torch.Tensor:
    table = BlockTable(BlockAllocator(runner.info.num_blocks, runner.info.block_size))
    table.reserve(len(PROMPT))
    return runner.run([SequenceInput(PROMPT, 0, table.block_ids, len(PROMPT))]).logits


@pytest.mark.parametrize(("name", "published", "newer"), PUBLISHED)
def test_the_decoder_serves_the_text_part_and_reads_no_other(
    name: str, published: set[str], newer: dict[str, str] | None, tmp_path: Path
) -> None:
    write_family(tmp_path, FAMILIES[name])
    expected = reference_logits(reference_model(tmp_path), PROMPT)
    rename(tmp_path, newer or {})
    with changing_tensors(tmp_path) as tensors:
        if "mtp.fc" in published:
            tensors["mtp.fc.weight"] = torch.full((32, 64), torch.nan)
        for other in [name for name in tensors if OTHER_PARTS.search(name)]:
            tensors[other].fill_(torch.nan)
    assert starts(tmp_path) >= published
    runner = cpu_runner(tmp_path, max_num_seqs=1)
    assert runner.forward.name == "decoder"
    torch.testing.assert_close(logits_of(runner), expected, atol=2e-5, rtol=0)


def test_forward_hf_keeps_the_language_model_alone(tmp_path: Path) -> None:
    write_family(tmp_path, FAMILIES["qwen2_5_vl"])
    expected = reference_logits(reference_model(tmp_path), PROMPT)
    runner = cpu_runner(tmp_path, max_num_seqs=1, forward="hf")
    torch.testing.assert_close(logits_of(runner), expected, atol=2e-5, rtol=0)
    forward: Any = runner.forward
    assert [name for name, _ in forward.model.base_model.named_children()] == ["language_model"]


def test_stacked_experts_are_turned_where_the_files_have_them_so(tmp_path: Path) -> None:
    """As Qwen3-VL's are published."""
    write_family(tmp_path, FAMILIES["qwen3_vl_moe"])
    expected = reference_logits(reference_model(tmp_path), PROMPT)
    with changing_tensors(tmp_path) as tensors:
        for name in [name for name in tensors if "mlp.experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    torch.testing.assert_close(logits_of(cpu_runner(tmp_path, max_num_seqs=1)), expected, atol=2e-5, rtol=0)


def test_a_text_part_that_scales_its_logits_is_left_to_the_library(tmp_path: Path) -> None:
    """Whose multimodal models do not scale them."""
    own = FAMILIES["llava"]
    values = {**own.values, "model_type": "granite", "logits_scaling": 4.0, "attention_multiplier": 0.3}
    write_family(tmp_path, replace(own, values=values))
    runner = cpu_runner(tmp_path, max_num_seqs=1)
    assert runner.forward.name == "hf"
    expected = reference_logits(reference_model(tmp_path), PROMPT)
    torch.testing.assert_close(logits_of(runner), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("gemma4", "gemma4_text"),
        # Two ranks of it start, and compute something else.
        ("gemma3n", "gemma3n_text"),
    ],
)
def test_several_ranks_are_refused_before_weights_load(name: str, model_type: str, tmp_path: Path) -> None:
    family_config(FAMILIES[name]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=f"tensor_parallel_size is 2; model type {model_type!r} allows only 1"
    ):
        describe(ModelArgs(str(tmp_path), tensor_parallel_size=2))


def test_weights_of_the_language_model_that_are_missing_are_named(tmp_path: Path) -> None:
    write_family(tmp_path, FAMILIES["qwen2_5_vl"])
    with changing_tensors(tmp_path) as tensors:
        down = [name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight")]
        [gone] = [name for name in down if "visual" not in name]
        del tensors[gone]
    with pytest.raises(ConfigError, match=r"lacks weights: \S*layers\.1\.mlp\.down_proj\.weight$"):
        cpu_runner(tmp_path)


class Whole(torch.nn.Module):
    """A language model, a part that text passes through, one that is asked a number, and another."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = torch.nn.Embedding(8, 8)
        self.bridge = torch.nn.Sequential(torch.nn.Linear(8, 8))
        self.vision = torch.nn.Linear(8, 8)
        self.audio = torch.nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.vision.in_features == 8
        return self.bridge(self.language_model(tokens))


class Model(torch.nn.Module):
    """Calls its parts as the library's models do."""

    device = torch.device("cpu")

    def __init__(self, decoder: str) -> None:
        super().__init__()
        self.model = self.base_model = Whole()
        self._decoder = decoder

    def get_decoder(self) -> torch.nn.Module:
        return self.get_submodule(self._decoder)

    def forward(self, tokens: torch.Tensor, *, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.model(tokens))


def test_a_part_is_dropped_only_if_text_does_without_it() -> None:
    model: Any = Model("model.language_model")
    drop_other_parts(model)
    assert [name for name, _ in model.model.named_children()] == ["language_model", "bridge", "vision"]


def test_a_model_for_text_alone_loses_nothing() -> None:
    model: Any = Model("model")
    drop_other_parts(model)
    assert len(list(model.model.named_children())) == 4
