"""Inflated hybrids: the function of their source bit by bit, and states that change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specray.engine.cache.state_pool import StatePool
from specray.engine.inputs import SequenceInput
from specray.engine.model.decoder import DecoderForward
from specray.errors import ConfigError
from specray.train.hybrid import HybridShape
from specray.train.inflate import inflate_checkpoint
from specray.train.mixture import MixtureShape
from tests.unit.engine.model.checkpoints import write_tokenizer
from tests.unit.engine.runners import cpu_runner
from tests.unit.train.test_inflate import SHAPES, VOCAB_SIZE, small_model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_have_the_bits_of_the_source(tmp_path: Path, tied: bool) -> None:
    small_model(tied=tied).save_pretrained(tmp_path / "small")
    write_tokenizer(tmp_path / "small", VOCAB_SIZE)
    for name, hybrid in (("dense", None), ("hybrid", HybridShape(2))):
        inflate_checkpoint(tmp_path / "small", tmp_path / name, SHAPES[1], hybrid=hybrid)
    ids = torch.randint(VOCAB_SIZE, (1, 13), generator=torch.Generator().manual_seed(1))
    logits, decoded = [], []
    for name in ("dense", "hybrid"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, local_files_only=True)
        with torch.no_grad():
            logits.append(model(input_ids=ids).logits[0])
        runner = cpu_runner(tmp_path / name)
        assert isinstance(runner.forward, DecoderForward)
        tokens = ids[0].tolist()
        steps = [runner.run([SequenceInput(tokens[:12], 0, [0], 12)]).logits.clone()]
        steps.append(runner.run([SequenceInput(tokens[12:], 12, [0], 1, num_open=1)]).logits.clone())
        decoded.append(torch.cat(steps))
    assert torch.equal(*logits) and torch.equal(*decoded)
    assert model.config.model_type == "granitemoehybrid"
    assert model.config.layer_types == [*["linear_attention"] * 2, "full_attention"] * 5
    assert isinstance(runner.cache.states, StatePool)
    assert [float(layer.states[0].abs().max()) > 0 for layer in runner.cache.states.layers] == [True] * 10


def test_shapes_that_cannot_be_are_named(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"recurrent: 0 is outside 1 \.\. 64"):
        HybridShape(0)
    with pytest.raises(ConfigError, match="hidden_size: 24; allowed: multiples of 32 for a hybrid"):
        inflate_checkpoint(tmp_path / "small", tmp_path / "big", SHAPES[0], hybrid=HybridShape(1))
    mixture = MixtureShape(16, 4, 0.6)
    with pytest.raises(ConfigError, match="experts and recurrent: both are given; allowed: one of them"):
        inflate_checkpoint(
            tmp_path / "small", tmp_path / "big", SHAPES[1], mixture=mixture, hybrid=HybridShape(1)
        )
