"""A model that the block cache cannot serve is refused when it is loaded, not served wrongly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from specray.engine.model.checks.refusals import known_refusal
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import family_config, write_tokenizer
from tests.unit.engine.model.zoo import FAMILIES
from tests.unit.engine.runners import cpu_runner


def refused(path: Path, model: Any) -> str:
    model.save_pretrained(path)
    write_tokenizer(path, 96)
    with pytest.raises(ConfigError) as caught:
        cpu_runner(path)
    return str(caught.value)


def test_state_space_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=96, hidden_size=16, state_size=4, num_hidden_layers=2)
    assert "it has recurrent layers" in refused(tmp_path, MambaForCausalLM(config))


def test_recurrent_layers_and_mlps_without_attention() -> None:
    """Nemotron-H lists its MLPs and experts as layers of their own."""
    config = family_config(FAMILIES["nemotron_h"])
    assert known_refusal(config, max_model_len=128) is None
    config.layers_block_type = ["linear_attention", "moe", "linear_attention", "mlp"]
    assert known_refusal(config, max_model_len=128) == (
        "it has recurrent layers alone; allowed: recurrent layers besides attention"
    )
    config.layers_block_type = ["mlp"]
    assert known_refusal(config, max_model_len=128) is None


@pytest.mark.parametrize(
    ("config_class", "model_class", "is_decoder", "reason"),
    [
        (BertConfig, BertLMHeadModel, False, "its tokens see those after them (is_decoder is false)"),
        (RobertaConfig, RobertaForCausalLM, False, "its tokens see those after them (is_decoder is false)"),
        (RobertaConfig, RobertaForCausalLM, True, "its positions do not begin at 0, as RoBERTa's do not"),
    ],
)
def test_an_encoder_is_refused_for_what_it_is(
    tmp_path: Path, config_class: Any, model_class: Any, is_decoder: bool, reason: str
) -> None:
    torch.manual_seed(0)
    config = config_class(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        is_decoder=is_decoder,
    )
    assert f"{model_class.__name__} is not supported: {reason}" in refused(tmp_path, model_class(config))
