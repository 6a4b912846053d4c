"""Frequencies that are divided by factors of a configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specray.engine.model.decoder_config import FactorScaling, RopeFormula
from specray.engine.model.families.config_json import read_decoder_config
from specray.engine.model.rotary import inverse_frequencies

FACTORS = [1.0, 1.0, 1.25, 2.0, 3.0, 4.6814823, 8.0, 8.0]


def factor_config(**changes: Any) -> dict[str, Any]:
    """A configuration whose frequencies are divided by ``FACTORS``."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 500_000.0,
        "short_factor": FACTORS,
        "long_factor": FACTORS,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 64,
    }
    sizes = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    return {**sizes, "max_position_embeddings": 128, "rope_parameters": {**rope, **changes}}


def test_factors_of_frequencies_give_the_librarys_frequencies_to_the_last_bit() -> None:
    values = factor_config()
    parsed = read_decoder_config(values)
    assert parsed is not None and parsed.rope == RopeFormula(500_000.0, FactorScaling(tuple(FACTORS)))
    config = AutoConfig.for_model(**values)
    for num_tokens in (32, 128):
        expected, scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=num_tokens)
        assert torch.equal(inverse_frequencies(parsed.rope, 16), expected)
        assert scale == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"long_factor": [2.0] * 8},
        {"attention_factor": 1.2},
        {"short_factor": FACTORS[:7], "long_factor": FACTORS[:7]},
        {"short_factor": [0.0] * 8, "long_factor": [0.0] * 8},
        {"short_factor": None, "long_factor": None},
        {"factor": 2.0},
    ],
)
def test_factors_that_mean_more_are_left_to_the_library(changes: dict[str, Any]) -> None:
    assert read_decoder_config(factor_config(**changes)) is None
