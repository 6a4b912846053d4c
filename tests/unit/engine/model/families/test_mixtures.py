"""Every mixture and every model of latent attention says what transformers says.

On the decoder, alone, and with chains and trees of drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.inputs import SequenceInput
from specray.engine.runner.runner import ModelRunner
from specray.types import SamplingParams
from tests.pairwise import pairs
from tests.unit.engine.harness import Session, generate_serial
from tests.unit.engine.model.checkpoints import (
    change_config,
    changing_tensors,
    reference_greedy,
    reference_logits,
    reference_model,
    write_checkpoint,
    write_family,
)
from tests.unit.engine.model.families.latent import LATENTS
from tests.unit.engine.model.families.mixtures import MIXTURES
from tests.unit.engine.model.zoo import VISION, family
from tests.unit.engine.runners import cpu_runner, target_over
from tests.unit.engine.trees.drafters import adversarial_drafter, empty_drafter, tree_drafter

PROMPT = [(11 * i * i + 3 * i) % 90 + 2 for i in range(19)]
NUM_TOKENS = 10
ATOL = 5e-5
"""Float32 logits here have a standard deviation of about 1.7."""


def built(path: Path) -> ModelRunner:
    runner = cpu_runner(path, max_num_seqs=2)
    assert runner.info.forward == "decoder"
    return runner


def logits_of(runner: ModelRunner) -> torch.Tensor:
    table = BlockTable(BlockAllocator(runner.info.num_blocks, runner.info.block_size))
    table.reserve(len(PROMPT))
    return runner.run([SequenceInput(PROMPT, 0, table.block_ids, len(PROMPT))]).logits


@pytest.mark.parametrize("name", [*MIXTURES, *LATENTS])
def test_logits_of_a_prompt(name: str, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(name)
    expected = reference_logits(reference_model(path), PROMPT)
    torch.testing.assert_close(logits_of(built(path)), expected, atol=ATOL, rtol=0)


@pairs(name=(*MIXTURES, *LATENTS), drafts=("none", "wrong chain", "tree"))
def test_tokens_with_and_without_drafts(name: str, drafts: str, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(name)
    output, runner = reference_greedy(reference_model(path), PROMPT, NUM_TOKENS + 5), built(path)
    drafter = {
        "none": empty_drafter,
        "wrong chain": adversarial_drafter(output, len(PROMPT), runner.info.vocab_size),
        "tree": tree_drafter(output, len(PROMPT), runner.info.vocab_size),
    }[drafts]
    engine = target_over(runner)
    session = Session("a", list(PROMPT), SamplingParams(temperature=0.0, num_prompt_tokens=len(PROMPT)))
    assert generate_serial(engine, drafter, session, NUM_TOKENS, 5) == output[:NUM_TOKENS]
    assert (max(session.accepted) > 0) == (drafts == "tree")


def test_kimi_k2_is_a_deepseek(tmp_path: Path) -> None:
    """Its files name code of its own, which is not run."""
    path = write_checkpoint(tmp_path, "deepseek_v3")
    runner = built(path)
    assert runner.info.context_row_share == 1.0
    expected = logits_of(runner)
    change_config(path, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.KimiConfig"})
    assert torch.equal(logits_of(built(path)), expected)


def test_the_text_part_of_kimi_k25(tmp_path: Path) -> None:
    vision = {**VISION, "pos_emb_height": 4, "pos_emb_width": 4}
    parts = {"vision_config": vision, "projection_hidden_size": 32, "tie_word_embeddings": False}
    path = write_family(tmp_path, family("kimi_k25", LATENTS["deepseek_v3"], model_type="deepseek_v3",
        other_parts=parts))  # fmt: skip
    with changing_tensors(path) as tensors:
        # The library renames the text's layers as those of images when it saves them.
        for name in [name for name in tensors if name.startswith("language_model.model.blocks.")]:
            tensors[name.replace(".blocks.", ".layers.")] = tensors.pop(name)
    expected = reference_logits(reference_model(path), PROMPT)
    torch.testing.assert_close(logits_of(built(path)), expected, atol=ATOL, rtol=0)


def test_experts_are_read_stacked_where_files_have_them_so(tmp_path: Path) -> None:
    """As some files of families have them whose others have each by itself."""
    path = write_checkpoint(tmp_path, "qwen2_moe")
    expected = logits_of(built(path))
    with changing_tensors(path) as tensors:
        for layer in (0, 2):
            prefix = f"model.layers.{layer}.mlp.experts."
            taken = [
                [tensors.pop(f"{prefix}{number}.{name}_proj.weight") for name in ("gate", "up", "down")]
                for number in range(6)
            ]
            tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(expert[:2]) for expert in taken])
            tensors[f"{prefix}down_proj"] = torch.stack([expert[2] for expert in taken])
    assert torch.equal(logits_of(built(path)), expected)


def test_experts_are_read_apart_where_files_have_them_so(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "granitemoeshared")
    expected = logits_of(built(path))
    with changing_tensors(path) as tensors:
        for layer in range(3):
            prefix = f"model.layers.{layer}.block_sparse_moe."
            both, down = (tensors.pop(f"{prefix}{name}_linear.weight") for name in ("input", "output"))
            for number in range(6):
                gate, up = both[number].chunk(2)
                parts = {"gate": gate, "up": up, "down": down[number]}
                own = f"model.layers.{layer}.mlp.experts.{number}."
                tensors |= {f"{own}{name}_proj.weight": part.clone() for name, part in parts.items()}
    assert torch.equal(logits_of(built(path)), expected)
