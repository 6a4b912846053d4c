"""Recurrent layers against the library's own modules, however rows are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specray.engine.cache.state_pool import StatePool
from specray.engine.model.checkpoint.names import decoder_names
from specray.engine.model.checkpoint.rank_weights import RankWeights
from specray.engine.model.decoder_config import layer_prefix
from specray.engine.model.families.from_library import decoder_config_of
from specray.engine.model.layers.mixer_lowering import lower_mixer
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.step import SequenceRows
from tests.unit.engine.model.checkpoints import InMemoryWeights, family_config, library_class
from tests.unit.engine.model.zoo import FAMILIES

NUM_ROWS = 130
LAYERS = {
    "qwen3_5": "linear_attn",
    "qwen3_next": "linear_attn",
    "olmo_hybrid": "linear_attn",
    "granitemoehybrid": "mamba",
    "bamba": "mamba",
    "falcon_h1-normed": "mamba",
    "nemotron_h": "mixer",
    "lfm2": "conv",
    "kimi_linear": "self_attn",
    "bailing_hybrid": "self_attn",
    "bailing_hybrid-unbounded": "self_attn",
}
"""Families, and the name of what the library's first layer has in the place of attention."""


def _cut_convolution(tensors: dict[str, torch.Tensor]) -> None:
    """Gives queries, keys and values a convolution each where they have projections of their own."""
    for prefix in (f"{layer_prefix(0)}{part}." for part in ("linear_attn", "self_attn")):
        projections = [tensors.get(f"{prefix}{part}_proj.weight") for part in "qkv"]
        sizes = [len(each) for each in projections if each is not None]
        if not sizes or f"{prefix}conv1d.weight" not in tensors:
            continue
        for part, rows in zip("qkv", tensors[f"{prefix}conv1d.weight"].split(sizes), strict=True):
            tensors[f"{prefix}{part}_conv1d.weight"] = rows


class Layer:
    """The first layer of a family, the library's and ours."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        config = family_config(FAMILIES[name])
        model = library_class(config).from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
        decoder = decoder_config_of(config, max_model_len=256)
        tensors = model.state_dict()
        found = {own: tensors[name].clone() for own, name in decoder_names(tensors).items()}
        _cut_convolution(found)
        weights = InMemoryWeights(found)
        assert decoder.recurrent is not None
        operators: Any = TorchOperators(torch.float32)
        prefix = layer_prefix(0)
        mixing = lower_mixer(prefix, decoder.recurrent, RankWeights(weights, None), operators)
        bias = weights.take(f"{prefix}{mixing.output}.bias") if mixing.has_output_bias else None
        self.output = operators.linear(weights.take(f"{prefix}{mixing.output}.weight"), bias)
        self.linear, self.mixer, self.hidden_size = mixing.linear, mixing.mixer, decoder.hidden_size
        self.module = getattr(model.model.layers[0], LAYERS[name])

    def pool(self) -> StatePool:
        """Whose memory holds NaN."""
        pool = StatePool(
            [self.mixer.shape], num_slots=2, max_open=8, dtype=torch.float32, device=torch.device("cpu")
        )
        pool.layers[0].fill(float("nan"))
        return pool

    def run(
        self, pool: StatePool, rows: torch.Tensor, start: int, end: int, num_open: int = 0
    ) -> torch.Tensor:
        with pool.step([SequenceRows(0, end - start, start, [0], (), 1, num_open)]):
            return self.output(self.mixer(self.linear(rows[start:end]), pool, 0))


@pytest.fixture(scope="module", params=list(LAYERS))
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(request.param)


@torch.inference_mode()
def test_rows_cut_anywhere_are_those_of_the_library(layer: Layer) -> None:
    rows = torch.randn(NUM_ROWS, layer.hidden_size)
    expected = layer.module(rows[None])[0]
    for cut in (1, 3, 63, 64, 65, 127, 128, 129, 130):
        pool = layer.pool()
        found = [layer.run(pool, rows, 0, cut)]
        if cut < NUM_ROWS:
            found.append(layer.run(pool, rows, cut, NUM_ROWS))
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-4)


@torch.inference_mode()
def test_open_rows_are_those_of_the_library(layer: Layer) -> None:
    """One by one, and eight at once, of which five stay."""
    rows = torch.randn(NUM_ROWS, layer.hidden_size)
    expected, single, several = layer.module(rows[None])[0], layer.pool(), layer.pool()
    for row in range(NUM_ROWS):
        found = layer.run(single, rows, row, row + 1, num_open=1)
        torch.testing.assert_close(found, expected[row : row + 1], rtol=1e-5, atol=1e-4)
    for start in range(0, NUM_ROWS - 8, 5):
        found = layer.run(several, rows, start, start + 8, num_open=8)
        torch.testing.assert_close(found, expected[start : start + 8], rtol=1e-5, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("end", [65, 128, 130])
def test_a_cut_at_a_multiple_of_the_unit_keeps_every_bit(layer: Layer, end: int) -> None:
    rows = torch.randn(NUM_ROWS, layer.hidden_size)
    # Products of fewer rows may have other bits, which are the linear layer's and not the mixer's.
    projected = layer.linear(rows)
    whole, cut = layer.pool(), layer.pool()

    def mix(pool: StatePool, start: int, stop: int, num_open: int) -> torch.Tensor:
        with pool.step([SequenceRows(0, stop - start, start, [0], (), 1, num_open)]):
            return layer.mixer(projected[start:stop], pool, 0)

    expected = mix(whole, 0, end, 1)
    assert torch.equal(torch.cat([mix(cut, 0, 64, 0), mix(cut, 64, end, 1)]), expected)
    assert torch.equal(cut.layers[0].states[1], whole.layers[0].states[1])
