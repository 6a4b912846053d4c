"""Shapes of the embedded pair's models, and functions that make and write them."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specray.train.tokenizer import BOS_TOKEN_ID, EOS_TOKEN_ID


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a Llama model with tied embeddings."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 4096
    max_position_embeddings: int = 2048


TARGET_SHAPE = ModelShape(
    hidden_size=384, num_layers=5, intermediate_size=1024, num_heads=6, num_kv_heads=2, head_dim=64
)
DRAFT_SHAPE = ModelShape(
    hidden_size=160, num_layers=2, intermediate_size=448, num_heads=5, num_kv_heads=5, head_dim=32
)


def new_model(shape: ModelShape, *, seed: int) -> LlamaForCausalLM:
    """Makes a randomly initialised bfloat16 model."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return to_dtype(model, torch.bfloat16)


def to_dtype(model: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    """Returns the same model with its parameters converted in place."""
    nn.Module.to(model, dtype)
    return model


def save_model(model: LlamaForCausalLM, tokenizer_directory: Path, directory: Path) -> None:
    """Writes bfloat16 safetensors, configuration and tokenizer as one loadable checkpoint."""
    to_dtype(model, torch.bfloat16).save_pretrained(directory)
    for file in sorted(tokenizer_directory.iterdir()):
        shutil.copyfile(file, directory / file.name)
