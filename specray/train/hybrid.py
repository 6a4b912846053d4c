"""Gives a Llama model the cost of recurrent layers, and leaves its function as it is.

Before each of its layers come some of Mamba 2 (as in Granite 4), whose states change with every token as
those of a trained model do. They and their MLPs read the rows with random weights and write zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import GraniteMoeHybridConfig, LlamaConfig, LlamaForCausalLM

from specray.errors import ConfigError

MAX_RECURRENT: Final = 64
_EXPAND: Final = 2
"""Numbers of all heads of a recurrent layer, in multiples of the hidden size."""
_HEAD_DIM, _STATE_DIM, _NUM_TAPS = 64, 128, 4


@dataclass(frozen=True, slots=True)
class HybridShape:
    """Recurrent layers before each layer. Raises ConfigError for what cannot be."""

    num_recurrent: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_recurrent <= MAX_RECURRENT:
            raise ConfigError(f"recurrent: {self.num_recurrent} is outside 1 .. {MAX_RECURRENT}")


def save_hybrid(model: LlamaForCausalLM, directory: Path, shape: HybridShape, *, seed: int = 0) -> None:
    """Writes a Granite 4 checkpoint with the model's function, without tokenizer.

    Raises:
        ConfigError: the model has biases in its MLPs, or its hidden size is no multiple of 32.
    """
    config = model.config
    if config.mlp_bias:
        raise ConfigError("source: has biases in MLPs; allowed for a hybrid: a model without")
    if _EXPAND * config.hidden_size % _HEAD_DIM:
        allowed = f"multiples of {_HEAD_DIM // _EXPAND} for a hybrid"
        raise ConfigError(f"hidden_size: {config.hidden_size}; allowed: {allowed}")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(model, shape, torch.Generator().manual_seed(seed)))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _config(config, shape, model.dtype).save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def _tensors(
    model: LlamaForCausalLM, shape: HybridShape, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    config, index = model.config, 0
    hidden, intermediate, dtype = config.hidden_size, config.intermediate_size, model.dtype
    for name, weight in model.state_dict().items():
        if not name.startswith("model.layers.") and not (
            name == "lm_head.weight" and config.tie_word_embeddings
        ):
            yield name, weight.contiguous()
    for layer in model.model.layers:
        for _ in range(shape.num_recurrent):
            prefix, index = f"model.layers.{index}.", index + 1
            for name, weight in _recurrent(hidden, generator):
                yield f"{prefix}mamba.{name}", weight.to(dtype)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}{norm}.weight", torch.ones(hidden, dtype=dtype)
            both = torch.randn(2 * intermediate, hidden, generator=generator).mul_(0.02)
            yield f"{prefix}shared_mlp.input_linear.weight", both.to(dtype)
            yield f"{prefix}shared_mlp.output_linear.weight", torch.zeros(hidden, intermediate, dtype=dtype)
        prefix, index = f"model.layers.{index}.", index + 1
        for name, weight in layer.state_dict().items():
            if not name.startswith("mlp."):
                yield f"{prefix}{name}", weight.contiguous()
        mlp = layer.mlp
        joined = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach()
        yield f"{prefix}shared_mlp.input_linear.weight", joined
        yield f"{prefix}shared_mlp.output_linear.weight", mlp.down_proj.weight.detach()


def _recurrent(hidden: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    size = _EXPAND * hidden
    num_heads, channels = size // _HEAD_DIM, size + 2 * _STATE_DIM

    def drawn(*sizes: int, scale: float) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).mul_(scale)

    yield "in_proj.weight", drawn(size + channels + num_heads, hidden, scale=0.02)
    yield "conv1d.weight", drawn(channels, 1, _NUM_TAPS, scale=0.5)
    yield "conv1d.bias", drawn(channels, scale=0.1)
    # As the library begins: heads forget at rates of 1 to their number.
    yield "A_log", torch.arange(1, num_heads + 1).float().log()
    yield "dt_bias", drawn(num_heads, scale=1.0) - 3.0
    yield "D", torch.ones(num_heads)
    yield "norm.weight", torch.ones(size)
    yield "out_proj.weight", torch.zeros(hidden, size)


def _config(config: LlamaConfig, shape: HybridShape, dtype: torch.dtype) -> GraniteMoeHybridConfig:
    num_heads = config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // num_heads
    kinds = [*["linear_attention"] * shape.num_recurrent, "full_attention"] * config.num_hidden_layers
    # The library takes a head's size, and does not declare it.
    head: dict[str, Any] = {"head_dim": head_dim}
    return GraniteMoeHybridConfig(
        architectures=["GraniteMoeHybridForCausalLM"],
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        shared_intermediate_size=config.intermediate_size,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        num_attention_heads=num_heads,
        num_key_value_heads=config.num_key_value_heads or num_heads,
        attention_bias=config.attention_bias,
        attention_multiplier=head_dim**-0.5,
        hidden_act=config.hidden_act,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters=config.rope_parameters,
        position_embedding_type="rope",
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_expand=_EXPAND,
        mamba_n_heads=_EXPAND * config.hidden_size // _HEAD_DIM,
        mamba_d_head=_HEAD_DIM,
        mamba_d_state=_STATE_DIM,
        mamba_d_conv=_NUM_TAPS,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        **head,
    )
