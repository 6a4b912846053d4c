"""The residual stream beside the logits, from every forward, graph and catch-up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig
from specray.engine.cache.blocks import BlockAllocator, BlockTable
from specray.engine.cache.sequence import EngineSequence
from specray.engine.inputs import SequenceInput
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner
from specray.engine.schedule import CatchUp, catch_up
from specray.types import SamplingParams
from tests.unit.engine.model.checkpoints import reference_model
from tests.unit.engine.runners import cpu_config, graphed

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
LAYERS = (0, 1)
ATOL = 2e-5


def make_runner(path: Path, forward: str, layers: tuple[int, ...] = LAYERS, **changes: object) -> ModelRunner:
    config = cpu_config(path, forward=forward, max_num_seqs=2, **changes)
    return build_runner(config, role="target", feature_layers=layers)


def expected(path: Path, token_ids: list[int]) -> dict[int, torch.Tensor]:
    """The library's hidden states: what enters each layer."""
    with torch.inference_mode():
        output = reference_model(path)(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
    return {layer: output.hidden_states[layer][0] for layer in LAYERS}


@pytest.mark.parametrize(
    ("name", "forward"),
    [("llama", "decoder"), ("llama", "hf"), ("granite", "decoder"), ("gemma3", "decoder")],
)
def test_features_are_what_enters_each_layer(
    checkpoint: Callable[[str], Path], name: str, forward: str
) -> None:
    """Granite's residual stream is computed at another scale than it has."""
    path = checkpoint(name)
    runner = make_runner(path, forward)
    wanted = expected(path, PROMPT)
    logits, first = runner.run([SequenceInput(PROMPT[:5], 0, [0], 0), SequenceInput([3], 0, [1], 1)])
    assert first is not None and len(logits) == 1
    _, second = runner.run([SequenceInput(PROMPT[5:], 5, [0], 3)])
    assert second is not None and sorted(first) == sorted(second) == list(LAYERS)
    for layer in LAYERS:
        found = torch.cat((first[layer][:5], second[layer]))
        torch.testing.assert_close(found, wanted[layer], atol=ATOL, rtol=0)


@pytest.mark.parametrize("forward", ["decoder", "hf"])
def test_none_where_nobody_listens(llama: Path, forward: str) -> None:
    runner = make_runner(llama, forward, ())
    assert runner.run([SequenceInput(PROMPT, 0, [0], 1)]).features is None


def test_captured_forwards_give_copies(llama: Path) -> None:
    runner, graphs = graphed(make_runner(llama, "decoder", attention="gather", block_size=16))
    features = runner.run([SequenceInput(PROMPT[:3], 0, [0], 3)]).features
    assert features is not None and graphs.buckets
    kept = {layer: rows.clone() for layer, rows in features.items()}
    runner.run([SequenceInput([40, 41, 42], 0, [1], 3)])
    wanted = expected(llama, PROMPT[:3])
    for layer in LAYERS:
        assert torch.equal(features[layer], kept[layer])
        torch.testing.assert_close(features[layer], wanted[layer], atol=ATOL, rtol=0)


def test_cpu_graphs_give_what_the_forward_gives() -> None:
    """Of the embedded draft: as it is, while it is captured, from the graph, and one step further."""
    settings = {"model": "embedded", "device": "cpu", "max_num_seqs": 2, "forward": "decoder"}
    runner = build_runner(EngineConfig.model_validate(settings), role="draft", feature_layers=(0, 1))
    if runner.cpu_graphs is None:
        pytest.skip("not all kernels here")
    found = [runner.run([SequenceInput([70 + at], at, [0], 1)]).features for at in range(6)]
    further = runner.advance([0], [76])
    assert further is not None and further.features is not None
    rows = [features for features in found if features is not None]
    assert len(rows) == 6
    whole = runner.run([SequenceInput([70 + at for at in range(7)], 0, [1], 1)]).features
    assert whole is not None
    for layer in (0, 1):
        singly = torch.cat([features[layer] for features in (*rows, further.features)])
        torch.testing.assert_close(singly.float(), whole[layer].float(), atol=0.02, rtol=0.02)


def test_catch_up_joins_the_pieces(llama: Path) -> None:
    runner = make_runner(llama, "decoder")
    allocator = BlockAllocator(runner.info.num_blocks, runner.info.block_size)
    sequence = EngineSequence("a", SamplingParams(), BlockTable(allocator))
    sequence.block_table.reserve(len(PROMPT))
    sequence.replace_tail(0, PROMPT)
    output = catch_up(runner, [CatchUp(sequence, 2)], 3)
    assert output is not None and output.features is not None and len(output.logits) == 2
    for layer, rows in expected(llama, PROMPT).items():
        torch.testing.assert_close(output.features[layer], rows, atol=ATOL, rtol=0)
    assert catch_up(runner, [CatchUp(sequence, 0)], 3) is None
