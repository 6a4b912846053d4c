"""Models with layers of the gated delta rule besides attention: Qwen3-Next, Qwen3.5 and their kin."""

from __future__ import annotations

from typing import Any

from specray.engine.model.layers.recurrent_config import DeltaLayers

DELTA = frozenset({"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})
"""Types with such layers."""


def delta_switches(config: Any) -> dict[str, Any]:
    """What these types have that Llama has not."""
    layers = DeltaLayers(
        tuple(kind == "linear_attention" for kind in config.layer_types),
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        is_joined=config.model_type == "qwen3_next",
    )
    return {
        "has_shifted_norms": True,
        "has_output_gate": True,
        "recurrent": layers if any(layers.layers) else None,
    }


def has_delta_heads(config: Any) -> bool:
    """Whether some layers attend, and each key head of the others has as many value heads."""
    return (
        "full_attention" in config.layer_types
        and config.linear_num_value_heads % config.linear_num_key_heads == 0
        and config.linear_conv_kernel_dim > 1
        and config.hidden_act == "silu"
    )
