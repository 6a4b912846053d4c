"""A model that the block cache cannot serve is refused when it is loaded, not served wrongly."""

from copy import deepcopy
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
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from specray.engine.model.checks.refusals import known_refusal
from specray.engine.model.hf_forward import HfForward
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import (
    family_config,
    reference_model,
    write_family,
    write_tokenizer,
)
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


@pytest.mark.parametrize("broken", ["single", "pair"])
def test_a_recurrent_kernel_that_is_wrong_for_single_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    """Alone or side by side; kernels of a GPU are others than those that the miniature runs with."""
    model = reference_model(write_family(tmp_path, FAMILIES["qwen3_next"]))
    right = qwen3_next.torch_recurrent_gated_delta_rule

    def wrong(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, state = right(query, *args, **kwargs)
        is_broken = len(query) == (1 if broken == "single" else 2)
        return output * (1.3 if is_broken else 1.0), state

    HfForward(deepcopy(model))
    monkeypatch.setattr(qwen3_next, "torch_recurrent_gated_delta_rule", wrong)
    with pytest.raises(ConfigError, match="over the block cache its logits are off by"):
        HfForward(model)
