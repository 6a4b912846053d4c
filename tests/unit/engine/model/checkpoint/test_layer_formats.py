"""Each quantised layer is read by the rule that its configuration has for it, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from specray.engine.model.checkpoint.layer_formats import LayerFormat, StoredFormat, UnreadFormatError
from specray.engine.model.checkpoint.stored_format import read_stored_format
from tests.unit.engine.model.stored_layouts import compressed, compressed_groups

Q, DOWN, GATE = (f"model.layers.{name}" for name in ("0.self_attn.q_proj", "1.mlp.down_proj", "1.mlp.gate"))


def stored(values: Mapping[str, Any]) -> StoredFormat:
    found = read_stored_format(values["quant_method"], values)
    assert found is not None
    return found


def packed(size: int, **values: Any) -> dict[str, Any]:
    return {"num_bits": 4, "strategy": "group", "group_size": size, **values}


def sizes(values: Mapping[str, Any]) -> list[int | None]:
    return [stored(values).of_layer(name).group_size for name in (Q, DOWN, "lm_head")]


def test_names_count_before_patterns_and_these_before_classes() -> None:
    groups = {"Linear": packed(16), "re:.*down_proj": packed(32), DOWN: packed(64)}
    assert sizes(compressed_groups("pack-quantized", groups)) == [16, 64, 16]
    del groups[DOWN]
    assert sizes(compressed_groups("pack-quantized", groups)) == [16, 32, 16]


def test_a_name_is_the_whole_name() -> None:
    groups = {"Linear": packed(16), "model.layers.1": packed(32), "down_proj": packed(64)}
    assert sizes(compressed_groups("pack-quantized", groups)) == [16, 16, 16]


def test_groups_may_have_formats_of_their_own() -> None:
    values = compressed_groups("mixed-precision", {"re:.*q_proj": packed(16), DOWN: {"num_bits": 8}})
    values["config_groups"]["group_0"]["format"] = "pack-quantized"
    values["config_groups"]["group_1"] |= {"format": "float-quantized"}
    found = stored(values)
    assert found.of_layer(Q) == LayerFormat(bits=4, group_size=16)
    assert found.of_layer(DOWN) == LayerFormat(bits=8)


@pytest.mark.parametrize(
    ("values", "name", "problem"),
    [
        (compressed_groups("pack-quantized", {"re:.*q_proj": packed(16)}), DOWN, "no target names"),
        (compressed_groups("pack-quantized", {"Embedding": packed(16)}), Q, "no target names"),
        (
            {**compressed("pack-quantized", **packed(16)), "ignore": ["lm_head"]},
            "lm_head",
            "leaves as it was",
        ),
        ({**compressed("pack-quantized", **packed(16)), "ignore": ["re:.*mlp.*"]}, DOWN, "leaves as it was"),
        (
            compressed_groups("pack-quantized", {"re:.*q_proj": packed(16), "re:.*attn.*": packed(32)}),
            Q,
            "several groups speak of",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down": {}}}, DOWN, "leaves as it was"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0"]}, Q, "leaves as it was"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["down_proj"]}, DOWN, "leaves as it was"),
        ({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, "lm_head", "leaves as it was"),
    ],
)
def test_layers_that_the_configuration_leaves_out_or_describes_twice(
    values: Mapping[str, Any], name: str, problem: str
) -> None:
    with pytest.raises(UnreadFormatError, match=problem):
        stored(values).of_layer(name)


def test_what_is_skipped_is_no_more_than_was_named() -> None:
    values = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1", "mlp.gate"]}
    assert stored(values).of_layer("model.layers.11.mlp.gate_proj") == LayerFormat()
    with pytest.raises(UnreadFormatError):
        stored(values).of_layer(GATE)


def test_the_first_pattern_of_gptq_counts() -> None:
    dynamic = {
        "+:.*layers.1.*": {"bits": 8, "group_size": 32},
        ".*down.*": {"bits": 8},
        ".*q_proj": {"desc_act": True},
    }
    found = stored({"quant_method": "gptq", "bits": 4, "group_size": 16, "dynamic": dynamic})
    first, second, other = (
        LayerFormat(bits=bits, zero_offset=1, group_size=size) for bits, size in ((8, 32), (8, 16), (4, 16))
    )
    assert found.of_layer(DOWN) == first
    assert found.of_layer("model.layers.0.mlp.down_proj") == second
    assert found.of_layer("model.layers.0.mlp.up_proj") == other
    assert found.of_layer(Q).also_needed == {"g_idx"}


def test_awq_of_any_kernel_and_with_zero_points_all_in_the_middle() -> None:
    """GPTQModel writes both, and ``dynamic`` for what it left as it was."""
    values = {"bits": 4, "group_size": 128, "zero_point": False, "backend": "marlin"}
    found = stored(
        {"quant_method": "awq", **values, "dynamic": {"-:.*mlp.gate$": {}, ".*q_proj": {"group_size": 64}}}
    )
    assert found.of_layer(DOWN) == LayerFormat(bits=4, group_size=128)
    assert found.of_layer(Q) == LayerFormat(bits=4, group_size=64)
    with pytest.raises(UnreadFormatError, match="leaves as it was"):
        found.of_layer(GATE)


@pytest.mark.parametrize(
    ("values", "offset"),
    [({}, 1), ({"format": "gptq"}, 1), ({"format": "gptq_v2"}, 0), ({"checkpoint_format": "gptq_v2"}, 0)],
)
def test_both_names_of_the_version_of_gptq(values: Mapping[str, Any], offset: int) -> None:
    found = stored({"quant_method": "gptq", "bits": 4, **values}).of_layer(Q)
    assert found.zero_offset == offset


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"bits": 4, "dynamic": {"+:.*": {"bits": 3}}}, "bits 3"),
        ({"bits": 4, "dynamic": ["+:.*"]}, "dynamic"),
        ({"bits": 4, "dynamic": {"+:(": {}}}, r"pattern '\('"),
        ({"bits": 4, "group_size": 0}, "group_size 0"),
        ({"bits": 4, "format": "marlin"}, "format 'marlin'"),
        ({"bits": 4, "format": "gptq", "checkpoint_format": "gptq_v2"}, "checkpoint_format 'gptq_v2' and"),
        ({"bits": 4, "is_marlin_format": True}, "is_marlin_format True"),
        ({"bits": 4, "pack_dtype": "int64"}, "pack_dtype 'int64'"),
        ({"bits": 4, "adapter": {"name": "lora"}}, "adapter"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv_fast"}, "format 'gemv_fast'"),
        ({"quant_method": "awq", "bits": 8}, "bits 8"),
        ({"quant_method": "awq", "bits": 4, "dynamic": {".*": {"bits": 8}}}, "bits 8"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers 'lm_head'"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "backend 'llm-awq'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert 'lm_head'"),
        (compressed("pack-quantized", num_bits=4, type="float"), "type 'float'"),
        (compressed("mixed-precision", num_bits=4), "format 'mixed-precision'"),
        ({**compressed("pack-quantized", num_bits=4), "ignore": ["re:["]}, r"pattern '\['"),
    ],
)
def test_values_that_are_not_read(values: Mapping[str, Any], problem: str) -> None:
    values = {"quant_method": "gptq", **values}
    with pytest.raises(UnreadFormatError, match=problem):
        stored(values)
