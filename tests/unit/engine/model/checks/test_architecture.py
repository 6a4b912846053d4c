"""The check at the start notices a forward that leaves out what an architecture's attention does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from specray.engine.model import hf_forward
from specray.engine.model.checks.architecture import check_architecture
from specray.engine.model.checks.miniature import build_miniature
from specray.engine.model.hf_forward import HfForward
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import family_config
from tests.unit.engine.model.zoo import FAMILIES


def no_rule(softcap: float | None, sinks: torch.Tensor | None) -> None:
    """Scores become weights by a softmax alone."""


def without_rotation(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries that do not see how far away a key is."""
    found = to_latent(module, query)
    return torch.cat(
        (found[..., : module.kv_lora_rank], torch.zeros_like(found[..., module.kv_lora_rank :])), -1
    )


to_latent = hf_forward.to_latent


@pytest.mark.parametrize(
    ("family", "changed", "name", "broken"),
    [
        # A real model's cap, of which a miniature's scores would stay far away.
        ("gemma2", {"attn_logit_softcapping": 50.0}, "ScoreRule", no_rule),
        ("gpt_oss", {}, "ScoreRule", no_rule),
        ("deepseek_v3", {}, "to_latent", without_rotation),
    ],
)
def test_what_is_left_out_is_refused(
    family: str, changed: dict[str, Any], name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = family_config(FAMILIES[family])
    for field, value in changed.items():
        setattr(config, field, value)
    check_architecture(config, max_model_len=128, make_forward=HfForward)
    monkeypatch.setattr(hf_forward, name, broken)
    with pytest.raises(ConfigError, match="its logits are off by"):
        check_architecture(config, max_model_len=128, make_forward=HfForward)


def test_a_miniature_keeps_layers_that_take_keys_and_values_from_others() -> None:
    """Of 35 layers, of which the last 20 compute none of their own: the first eight and the last eight."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    config = AutoConfig.for_model(
        "gemma4_text",
        num_hidden_layers=35,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        num_kv_shared_layers=20,
        layer_types=kinds,
        intermediate_size=64,
    )
    small: Any = build_miniature(config, max_model_len=4096).config
    assert small.layer_types == kinds[:8] + kinds[-8:]
    assert small.num_kv_shared_layers == 8
    assert [layer.head_dim for layer in small.per_layer_config] == [
        16 if kind == "sliding_attention" else 32 for kind in small.layer_types
    ]


def test_a_miniature_has_as_many_frequencies_by_axis_as_heads_have() -> None:
    config = family_config(FAMILIES["qwen2_5_vl"])
    text = config.get_text_config()
    text.hidden_size, text.rope_parameters["mrope_section"] = 512, [16, 24, 24]
    small = build_miniature(config, max_model_len=128).config.get_text_config()
    assert small.rope_parameters["mrope_section"] == [4, 2, 2]


def test_a_vision_part_of_published_size_is_shrunk() -> None:
    """Qwen2-VL's merger grows with the width of what it merges."""
    config = family_config(FAMILIES["qwen2_vl"])
    config.vision_config = type(config.vision_config)()
    assert config.vision_config.embed_dim == 1280
    build_miniature(config, max_model_len=128)
