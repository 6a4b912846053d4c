"""Inflated mixtures: the function of their source bit by bit, and routing that differs by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from specray.engine.inputs import SequenceInput
from specray.engine.model.decoder import DecoderForward
from specray.engine_info import RoutedExperts
from specray.errors import ConfigError
from specray.train.mixture import MixtureFigures, MixtureShape, read_rows, save_mixture
from tests.unit.engine.model.checkpoints import write_tokenizer
from tests.unit.engine.runners import cpu_runner
from tests.unit.train.test_inflate import VOCAB_SIZE, small_model

SHAPE = MixtureShape(16, 4, share=0.6)


def text(num_tokens: int = 1200) -> torch.Tensor:
    """Tokens in runs of a few alike, as words of one subject are."""
    draws = torch.Generator().manual_seed(3)
    return torch.randint(VOCAB_SIZE, (num_tokens // 4,), generator=draws).repeat_interleave(4)


def written(directory: Path, model: LlamaForCausalLM, shape: MixtureShape = SHAPE) -> MixtureFigures:
    return save_mixture(model, directory, shape, text(), seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_have_the_bits_of_the_source(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    small_model(tied=tied).save_pretrained(tmp_path / "small")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=dtype, local_files_only=True)
    written(tmp_path / "big", small)
    mixture = AutoModelForCausalLM.from_pretrained(tmp_path / "big", dtype=dtype, local_files_only=True)
    assert mixture.config.model_type == "qwen2_moe" and mixture.config.num_experts_per_tok == 4
    ids = torch.randint(VOCAB_SIZE, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(mixture(input_ids=ids).logits, small(input_ids=ids).logits)


def test_the_decoder_gives_the_bits_of_the_source_and_counts(tmp_path: Path) -> None:
    """In float32; in bfloat16 it rounds a dense layer's output once, with the stream to which it is added."""
    small = small_model()
    small.save_pretrained(tmp_path / "small")
    written(tmp_path / "big", small)
    logits = []
    for name in ("small", "big"):
        write_tokenizer(tmp_path / name, VOCAB_SIZE)
        runner = cpu_runner(tmp_path / name)
        assert isinstance(runner.forward, DecoderForward)
        steps = [runner.run([SequenceInput(list(range(2, 14)), 0, [0, 1, 2], 12)]).logits.clone()]
        steps.append(runner.run([SequenceInput([20], 12, [0, 1, 2], 1)]).logits.clone())
        logits.append(torch.cat(steps))
    assert torch.equal(*logits)
    hits = runner.forward.expert_hits
    assert hits is not None and hits.info == RoutedExperts(2 * 16, 2 * 4) and hits.read() == 2 * 4


def test_experts_are_as_wide_as_their_share_says(tmp_path: Path) -> None:
    small = small_model()
    figures = written(tmp_path, small, MixtureShape(8, 2, share=0.9))
    dense = sum(weight.numel() for weight in small.parameters())
    routed = 2 * 2 * 3 * 24 * figures.intermediate_size
    assert figures.share == pytest.approx(routed / (routed + dense))
    assert figures.share == pytest.approx(0.9, abs=0.02) and figures.intermediate_size % 32 == 0
    # And never too narrow for a kernel.
    assert written(tmp_path, small, MixtureShape(8, 2, share=0.01)).intermediate_size == 32


def test_routing_differs_by_token_and_neighbours_share_more_where_directions_are_slow(tmp_path: Path) -> None:
    small = small_model()
    hit = {
        neighbours: dict(written(tmp_path, small, MixtureShape(64, 4, 0.6, neighbours)).hit)
        for neighbours in (0.0, 1.0)
    }
    for multiples in hit.values():
        assert 1.0 < multiples[2] < multiples[4] < multiples[8] < 8.0
    assert hit[1.0][8] < 0.9 * hit[0.0][8]


def test_a_text_is_read_as_the_mlp_of_each_layer_is_given_it() -> None:
    small = small_model()
    tokens = text(600)
    rows = read_rows(small, tokens)
    assert rows.shape == (2, 600, 24)
    # The second window begins anew.
    assert torch.equal(rows[:, 512:], read_rows(small, tokens[512:]))
    assert not small.model.layers[0].mlp._forward_pre_hooks


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, 1, 0.5), "experts: 1 is outside 2 .. 4096"),
        ((8, 8, 0.5), "chosen: 8 is outside 1 .. 7"),
        ((8, 2, 1.0), "share: 1.0 is not between 0 and 1"),
        ((8, 2, 0.5, 1.5), "neighbours: 1.5 is outside 0 .. 1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(values: tuple[int, int, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MixtureShape(*values)


def test_biases_and_short_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source: has biases; allowed for a mixture: a model without"):
        written(tmp_path, small_model(bias=True))
    with pytest.raises(ConfigError, match="text: has 95 tokens; allowed: 96 or more for this width"):
        save_mixture(small_model(), tmp_path, SHAPE, text()[:95])
