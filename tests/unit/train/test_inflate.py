"""Tests of inflated checkpoints: they compute the function of their source."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig

from specray.errors import ConfigError
from specray.train.inflate import HeadLayout, InflatedShape, inflate_checkpoint, inflate_model, place_heads

VOCAB_SIZE = 97


def small_model(
    *, heads: int = 6, kv_heads: int = 2, tied: bool = True, bias: bool = False, eps: float = 1e-6
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=8,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            attention_bias=bias,
            mlp_bias=bias,
            rms_norm_eps=eps,
            initializer_range=0.3,
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
    return model


def logits_of(model: LlamaForCausalLM) -> torch.Tensor:
    ids = torch.randint(VOCAB_SIZE, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.float()(input_ids=ids).logits


SHAPES = [
    InflatedShape(hidden_size=24, num_layers=2, intermediate_size=40, num_heads=6, num_kv_heads=2),
    InflatedShape(hidden_size=64, num_layers=5, intermediate_size=111, num_heads=16, num_kv_heads=8),
    InflatedShape(hidden_size=25, num_layers=2, intermediate_size=40, num_heads=6, num_kv_heads=6),
    InflatedShape(hidden_size=96, num_layers=3, intermediate_size=41, num_heads=16, num_kv_heads=2),
    InflatedShape(hidden_size=40, num_layers=4, intermediate_size=64, num_heads=8, num_kv_heads=4),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.hidden_size}-{s.num_heads}-{s.num_kv_heads}")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_equal_the_source(shape: InflatedShape, tied: bool) -> None:
    small = small_model(tied=tied)
    big = inflate_model(small, shape, dtype=torch.float32)
    assert big.config.tie_word_embeddings is tied
    torch.testing.assert_close(logits_of(big), logits_of(small), atol=1e-4, rtol=0)


def test_biases_are_carried_over_and_stay_zero_in_the_added_dimensions() -> None:
    small = small_model(bias=True)
    big = inflate_model(small, SHAPES[1], dtype=torch.float32)
    torch.testing.assert_close(logits_of(big), logits_of(small), atol=1e-4, rtol=0)


def test_a_large_epsilon_is_corrected_for_the_wider_mean() -> None:
    small = small_model(eps=0.5)
    big = inflate_model(small, SHAPES[1], dtype=torch.float32)
    assert big.config.rms_norm_eps == pytest.approx(0.5 * 24 / 64)
    torch.testing.assert_close(logits_of(big), logits_of(small), atol=1e-4, rtol=0)


def test_what_is_added_reads_with_random_weights_and_writes_nothing() -> None:
    big = inflate_model(small_model(), SHAPES[1], dtype=torch.float32)
    added = big.model.layers[4]
    assert added.self_attn.q_proj.weight.count_nonzero() == added.self_attn.q_proj.weight.numel()
    assert added.mlp.up_proj.weight.count_nonzero() == added.mlp.up_proj.weight.numel()
    assert added.self_attn.o_proj.weight.count_nonzero() == 0
    assert added.mlp.down_proj.weight.count_nonzero() == 0
    for layer in big.model.layers:
        assert layer.self_attn.o_proj.weight[24:].count_nonzero() == 0
        assert layer.mlp.down_proj.weight[24:].count_nonzero() == 0
    assert big.model.embed_tokens.weight[:, 24:].count_nonzero() == 0


def test_three_query_heads_per_kv_head_split_over_two_copies_of_groups_of_two() -> None:
    shape = InflatedShape(64, 2, 40, num_heads=16, num_kv_heads=8)
    assert place_heads(small_model().config, shape) == HeadLayout(
        query_heads=(0, 1, 2, 4, 5, 6), kv_heads=(0, 0, 1, 1, None, None, None, None)
    )


def test_float32_checkpoint_of_a_bfloat16_source_equals_it(tmp_path: Path) -> None:
    small_model().to(torch.bfloat16).save_pretrained(tmp_path / "small")
    (tmp_path / "small" / "tokenizer.json").write_text("{}")
    inflate_checkpoint(tmp_path / "small", tmp_path / "big", SHAPES[1], dtype="float32")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    big = AutoModelForCausalLM.from_pretrained(tmp_path / "big", dtype="auto")
    assert big.dtype == torch.float32
    assert (tmp_path / "big" / "tokenizer.json").read_text() == "{}"
    torch.testing.assert_close(logits_of(big), logits_of(small), atol=1e-4, rtol=0)


def test_the_dtype_of_the_source_is_kept_and_growth_by_four_is_exact_in_it(tmp_path: Path) -> None:
    small_model().to(torch.bfloat16).save_pretrained(tmp_path / "small")
    inflate_checkpoint(tmp_path / "small", tmp_path / "big", InflatedShape(96, 3, 48, 8, 4))
    assert json.loads((tmp_path / "big" / "config.json").read_text())["dtype"] == "bfloat16"
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    big = AutoModelForCausalLM.from_pretrained(tmp_path / "big", dtype="auto")
    assert big.dtype == torch.bfloat16
    torch.testing.assert_close(logits_of(big), logits_of(small), atol=1e-4, rtol=0)


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second, other = (
        inflate_model(small_model(), SHAPES[1], dtype=torch.float32, seed=seed) for seed in (3, 3, 4)
    )
    weights = [model.model.layers[3].mlp.up_proj.weight for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (InflatedShape(23, 2, 40, 6, 2), r"hidden_size: 23 is outside 24 .* 65536"),
        (InflatedShape(24, 1, 40, 6, 2), r"num_layers: 1 is outside 2 .* 1024"),
        (InflatedShape(24, 2, 39, 6, 2), r"intermediate_size: 39 is outside 40"),
        (InflatedShape(24, 2, 40, 5, 2), r"num_heads: 5 is outside 6"),
        (InflatedShape(24, 2, 40, 6, 1), r"num_kv_heads: 1 is outside 2"),
        (InflatedShape(24, 2, 40, 16, 5), r"num_kv_heads: 5 does not divide num_heads 16"),
        (InflatedShape(24, 2, 40, 6, 3), r"num_kv_heads: 3 is too few .* at least 4"),
        (InflatedShape(10**9, 2, 40, 6, 2), r"hidden_size: 1000000000 is outside"),
    ],
)
def test_impossible_shapes_name_field_value_and_range(shape: InflatedShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inflate_model(small_model(), shape, dtype=torch.float32)


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"source: .*nowhere is not a checkpoint directory"):
        inflate_checkpoint(tmp_path / "nowhere", tmp_path / "big", SHAPES[1])


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    OPTConfig().save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match="model_type 'opt'"):
        inflate_checkpoint(tmp_path / "small", tmp_path / "big", SHAPES[1])


def test_an_unknown_dtype_and_a_used_destination_are_refused(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match="dtype: 'int3' is not one of bfloat16, float16, float32"):
        inflate_checkpoint(tmp_path / "small", tmp_path / "big", SHAPES[1], dtype="int3")
    with pytest.raises(ConfigError, match="already exists"):
        inflate_checkpoint(tmp_path / "small", tmp_path / "small", SHAPES[1])
