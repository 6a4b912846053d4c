"""Features behind the last layer, on both sides of the final norm, and bits that are the library's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specray.config import EngineConfig
from specray.engine.inputs import SequenceInput
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner
from tests.unit.engine.model.checkpoints import reference_model, write_checkpoint
from tests.unit.engine.runner.test_features import PROMPT, make_runner

NUM_LAYERS = 2
ALL = (0, 1, 2, 3)
"""What enters both layers, what leaves the last one, and what the head reads."""


def features(runner: ModelRunner, token_ids: list[int] = PROMPT, num_logits: int = 1) -> Any:
    found = runner.run([SequenceInput(token_ids, 0, [0], num_logits)]).features
    assert found is not None
    return found


@torch.inference_mode()
def expected(path: Path) -> dict[int, torch.Tensor]:
    """The library's; what leaves the last layer is seen from inside it."""
    model, seen = reference_model(path), []
    model.model.layers[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    states = model(torch.tensor([PROMPT]), output_hidden_states=True, use_cache=False).hidden_states
    last = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    return {0: states[0][0], 1: states[1][0], 2: last[0], 3: states[2][0]}


@pytest.mark.parametrize("forward", ["decoder", "hf"])
def test_the_last_two_lie_on_both_sides_of_the_final_norm(llama: Path, forward: str) -> None:
    found, wanted = features(make_runner(llama, forward, ALL)), expected(llama)
    assert sorted(found) == list(ALL)
    for layer in ALL:
        torch.testing.assert_close(found[layer], wanted[layer], atol=2e-5, rtol=0)
    assert torch.equal(found[0], wanted[0])


def test_late_features_of_a_model_with_multipliers(tmp_path: Path) -> None:
    """Its residual stream is computed at another scale, and its logits' factor is in the last norm."""
    path = write_checkpoint(tmp_path, "granite")
    found, wanted = features(make_runner(path, "decoder", ALL)), expected(path)
    for layer in ALL:
        torch.testing.assert_close(found[layer], wanted[layer], atol=2e-5, rtol=0)


@pytest.mark.parametrize("forward", ["decoder", "hf"])
def test_the_norm_joins_the_last_two_and_the_head_reads_the_last(llama: Path, forward: str) -> None:
    runner = make_runner(llama, forward, ALL)
    output = runner.run([SequenceInput(PROMPT, 0, [0], 2)])
    assert output.features is not None
    model = reference_model(llama)
    with torch.inference_mode():
        normed = model.model.norm(output.features[NUM_LAYERS])
        logits = model.lm_head(output.features[NUM_LAYERS + 1][-2:])
    torch.testing.assert_close(output.features[NUM_LAYERS + 1], normed, atol=2e-6, rtol=0)
    torch.testing.assert_close(output.logits, logits, atol=2e-5, rtol=0)
    assert len(output.features[NUM_LAYERS]) == len(PROMPT), "rows without logits have features, too"


def test_hf_features_are_the_models_own_bit_for_bit(llama: Path) -> None:
    """Two conventions: what enters layer k, and what leaves layer k - 1."""
    runner = make_runner(llama, "hf", ALL)
    model, left = runner.forward.model, {}  # type: ignore[attr-defined]
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda module, args, output, index=index: left.__setitem__(
                index, output[0] if isinstance(output, tuple) else output
            )
        )
    found = features(runner)
    assert all(torch.equal(found[index + 1], rows[0]) for index, rows in left.items())
    assert sorted(left) == [0, 1]


def test_a_shorter_model_leaves_what_enters_the_next_layer_bit_for_bit(tmp_path: Path) -> None:
    """The decoder: what leaves layer k - 1 of a model that ends there is what enters layer k of the whole."""
    path = write_checkpoint(tmp_path / "whole", "llama", num_hidden_layers=3)
    short = tmp_path / "short"
    model = reference_model(path)
    model.config.num_hidden_layers = 2
    model.model.layers = model.model.layers[:2]
    model.save_pretrained(short)
    for file in path.glob("tokenizer*"):
        (short / file.name).write_bytes(file.read_bytes())
    whole = features(make_runner(path, "decoder", (2,)))
    assert torch.equal(whole[2], features(make_runner(short, "decoder", (2,)))[2])


@pytest.mark.parametrize("forward", ["decoder", "hf"])
def test_listening_changes_no_logit(llama: Path, forward: str) -> None:
    plain = make_runner(llama, forward, ()).run([SequenceInput(PROMPT, 0, [0], 2)])
    tapped = make_runner(llama, forward, ALL).run([SequenceInput(PROMPT, 0, [0], 2)])
    assert plain.features is None
    torch.testing.assert_close(tapped.logits, plain.logits, atol=2e-5, rtol=0)


def test_cpu_graphs_give_what_the_forward_gives() -> None:
    """Of the embedded target: as it is, while it is captured, and from the graph."""
    settings = {"model": "embedded", "device": "cpu", "max_num_seqs": 2, "forward": "decoder"}
    config = EngineConfig.model_validate(settings)
    late = (build_runner(config, role="target").forward.cache_shape.num_layers,)
    late += (late[0] + 1,)
    runner = build_runner(config, role="target", feature_layers=late)
    if runner.cpu_graphs is None:
        pytest.skip("not all kernels here")
    tokens = [70 + at for at in range(12)]
    found = [runner.run([SequenceInput(tokens[at : at + 2], at, [0], 1)]) for at in range(0, 12, 2)]
    whole = runner.run([SequenceInput(tokens, 0, [1], 1)])
    assert whole.features is not None
    for layer in late:
        pieces = torch.cat([output.features[layer] for output in found if output.features is not None])
        torch.testing.assert_close(pieces.float(), whole.features[layer].float(), atol=0.05, rtol=0.05)
    torch.testing.assert_close(found[-1].logits, whole.logits, atol=0.2, rtol=0.05)
