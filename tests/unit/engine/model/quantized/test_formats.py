"""Which weights are quantised, what is refused before anything is loaded, and the bytes of it all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specray.config import EngineConfig, parse_config
from specray.engine.model.description import ModelArgs, describe
from specray.engine.model.loader import load_model
from specray.engine.model.quantized.formats import WeightFormats
from specray.engine.preflight import check_model
from specray.engine.weights.quantization import Quantization
from specray.errors import ConfigError
from tests.unit.engine.model import test_lowering
from tests.unit.engine.model.checkpoints import write_checkpoint

INT8, INT4, NONE = Quantization.INT8, Quantization.INT4, Quantization.NONE
CONFIG = replace(
    test_lowering.CONFIG,
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    head_dim=16,
    has_qkv_bias=False,
    has_output_bias=False,
    has_mlp_bias=False,
    has_head_norm=False,
    windows=(None,) * 3,
)
LAYER = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
NORMS = 7 * 64


@pytest.mark.parametrize(
    ("formats", "is_tied", "expected"),
    [
        (WeightFormats(), False, 2 * (3 * LAYER + NORMS + 2 * 6400)),
        (WeightFormats(), True, 2 * (3 * LAYER + NORMS + 6400)),
        # A group of 32 weights: 32 bytes and a scale; 16 bytes, a scale and a minimum.
        (WeightFormats(INT8), False, 3 * LAYER * 34 // 32 + 2 * (NORMS + 2 * 6400)),
        (WeightFormats(INT4, INT8), False, 3 * LAYER * 20 // 32 + 2 * (NORMS + 6400) + 6400 * 34 // 32),
        (WeightFormats(INT4, INT8), True, 3 * LAYER * 20 // 32 + 2 * (NORMS + 6400) + 6400 * 34 // 32),
        (WeightFormats(INT4, INT8, True), True, 3 * LAYER * 20 // 32 + 2 * NORMS + 6400 * 34 // 32),
        (WeightFormats(NONE, INT4, True), False, 2 * (3 * LAYER + NORMS) + 2 * 6400 * 20 // 32),
    ],
)
def test_bytes_of_all_weights(formats: WeightFormats, is_tied: bool, expected: int) -> None:
    assert formats.num_bytes(replace(CONFIG, tie_word_embeddings=is_tied), 2) == expected


def test_a_loaded_model_has_the_bytes_that_it_will_hold(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama", intermediate_size=64)
    args = ModelArgs(str(path), formats=WeightFormats(INT4))
    plain, held = (
        load_model(one, dtype=torch.bfloat16, device=torch.device("cpu")).num_weight_bytes
        for one in (ModelArgs(str(path)), args)
    )
    layers = 2 * (64 * 32 + 32 * 32 + 3 * 64 * 32)
    assert plain - held == layers * 2 - layers * 20 // 32


def test_groups_that_ranks_would_cut_are_refused() -> None:
    formats = WeightFormats(INT4)
    formats.check("m", CONFIG, 1)
    with pytest.raises(
        ConfigError,
        match=r"^quantization is 'int4'; model 'm' has 48 input features on a rank \(intermediate_size\), "
        r"which must be a multiple of 32; allowed: 'none'$",
    ):
        formats.check("m", CONFIG, 2)
    # The head's rows are shared out, not its columns.
    WeightFormats(NONE, INT8).check("m", CONFIG, 2)
    with pytest.raises(ConfigError, match=r"^lm_head_quantization is 'int8'; .* 72 .* \(hidden_size\)"):
        WeightFormats(NONE, INT8).check("m", replace(CONFIG, hidden_size=72), 1)


def test_a_model_that_cannot_be_quantised_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"has 48 input features on a rank \(intermediate_size\)"):
        describe(ModelArgs(str(path), formats=WeightFormats(INT8)))
    with pytest.raises(ConfigError, match=r"has 48 input features on a rank \(intermediate_size\)"):
        check_model(EngineConfig(model=str(path), quantization="int8"), "target")


def test_the_generic_forward_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "gpt2")
    with pytest.raises(
        ConfigError, match=r"^quantization is 'int8'; forward hf, which runs model .* 'none'$"
    ):
        describe(ModelArgs(str(path), formats=WeightFormats(INT8)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target": {"quantization": "int3"}}, "target.quantization"),
        (
            {"target": {"quantization": "int4", "forward": "hf"}},
            "quantization is 'int4' with forward 'hf'; allowed with it: 'none'",
        ),
        (
            {"draft": {"lm_head_quantization": "int8", "model": "ngram"}},
            "lm_head_quantization is 'int8' with model 'ngram'; allowed with it: 'none'",
        ),
        (
            {"target": {"quantize_embedding": True}},
            "quantize_embedding is true with lm_head_quantization 'none'; allowed: 'int8' or 'int4'",
        ),
    ],
)
def test_settings_that_make_no_sense_together(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(values)


def test_outputs_depend_on_the_formats() -> None:
    """A request may go on at another target only where the numbers are the same."""
    target = parse_config({"target": {"quantization": "int4", "lm_head_quantization": "int8"}}).target
    assert target.number_format == "bfloat16 int4 layers int8 lm_head"
    assert parse_config({}).target.number_format == "bfloat16"
