"""The text part of multimodal checkpoints: names as they are published, and what is dropped after loading."""

from __future__ import annotations

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
QWEN = {"model.": "model.language_model.", "visual.": "model.visual."}


@pytest.mark.parametrize(
    ("name", "published", "newer"),
    [
        # As of Mistral-Small-3.1 and Qwen2.5-VL, each followed by the names of the library's modules.
        ("mistral3", {"language_model.model", "language_model.lm_head"}, None),
        ("mistral3", {"model.language_model", "lm_head.weight"}, MISTRAL),
        ("qwen2_5_vl", {"model.layers", "model.embed_tokens", "model.norm", "lm_head.weight"}, None),
        ("qwen2_5_vl", {"model.language_model", "lm_head.weight"}, QWEN),
    ],
)
def test_names_of_both_layouts_are_read_and_only_the_language_model_stays(
    name: str, published: set[str], newer: dict[str, str] | None, tmp_path: Path
) -> None:
    write_family(tmp_path, FAMILIES[name])
    expected = reference_logits(reference_model(tmp_path), PROMPT)
    rename(tmp_path, newer or {})
    assert starts(tmp_path) >= published
    runner = cpu_runner(tmp_path, max_num_seqs=1)
    table = BlockTable(BlockAllocator(runner.info.num_blocks, runner.info.block_size))
    table.reserve(len(PROMPT))
    logits = runner.run([SequenceInput(PROMPT, 0, table.block_ids, len(PROMPT))]).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
    forward: Any = runner.forward
    assert [name for name, _ in forward.model.base_model.named_children()] == ["language_model"]


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("qwen3_vl", "qwen3_vl_text"),
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
