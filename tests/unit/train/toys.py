"""A tokenizer of bytes with a chat template, and tiny random Llamas, for tests of training."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_toy_tokenizer(directory: Path) -> None:
    """Ids 0 to 2 are ``<unk>``, ``<s>`` and ``</s>``; the others are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {
        letter: 3 + index for index, letter in enumerate(alphabet)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def toy_llama(
    seed: int,
    *,
    vocab_size: int = 300,
    hidden_size: int = 32,
    num_layers: int = 1,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    intermediate_size: int = 32,
) -> LlamaForCausalLM:
    """A random model in bfloat16 with tied embeddings; it begins with id 0 and ends with id 1."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    nn.Module.to(model, torch.bfloat16)
    return model


def save_model(model: LlamaForCausalLM, tokenizer_directory: Path, directory: Path) -> None:
    """Writes bfloat16 safetensors, configuration and tokenizer as one checkpoint."""
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(directory)
    for file in sorted(tokenizer_directory.iterdir()):
        shutil.copyfile(file, directory / file.name)
