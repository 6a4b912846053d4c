"""Tiny random checkpoints on disk, and the reference that engines are compared with."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from specray.engine.model.checkpoint.source import WeightPart
from tests.unit.engine.model.families.latent import LATENTS
from tests.unit.engine.model.families.mixtures import MIXTURES
from tests.unit.engine.model.zoo import FAMILIES, Family

VOCAB_SIZE = 96
HIDDEN = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    # Wide enough that argmaxes differ from position to position.
    "initializer_range": 0.3,
}
DECODER: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama-biased-scaled": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"num_key_value_heads": 2, "sliding_window": None, "tie_word_embeddings": False},
    "mistral-windowed": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 7},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "num_hidden_layers": 3,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "smollm3": {"num_key_value_heads": 2, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    "phi3": {
        "num_key_value_heads": 2,
        "sliding_window": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    },
    "granite": {
        "num_key_value_heads": 2,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "swiglu_limit": 2.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
}
HF: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "olmo2": {"num_key_value_heads": 2},
    "mimo_v2_flash": FAMILIES["mimo_v2_flash"].values,
}
SHARED = {name: FAMILIES[name].values for name in ("gemma2", "afmoe", "cohere2_moe")}
"""More of the library's, for ranks."""


class InMemoryWeights:
    """Implements ``source.WeightSource`` over tensors that are there already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, part: WeightPart | None = None) -> torch.Tensor:
        tensor = self._tensors[name]
        if part is not None:
            tensor = tensor.narrow(part.dim, part.start, part.stop - part.start)
        return tensor.contiguous()

    def stored(self, name: str, part: WeightPart | None = None) -> None:
        """All are plain."""


def tiny_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of one of the architectures above."""
    values = {**HIDDEN, **{**DECODER, **MIXTURES, **LATENTS, **HF, **SHARED}[name], **overrides}
    model_type = values.pop("model_type", name)
    return AutoConfig.for_model(model_type, **values)


def write_checkpoint(directory: Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes random float32 weights and a byte-free toy tokenizer; returns the directory."""
    return write_model(directory, tiny_config(name, **overrides), seed=seed)


def write_family(directory: Path, family: Family) -> Path:
    """As :func:`write_checkpoint`, of a family of the zoo."""
    return write_model(directory, family_config(family), seed=0)


def family_config(family: Family) -> PreTrainedConfig:
    """The configuration of a family of the zoo at tiny size."""
    values: dict[str, Any] = {**HIDDEN, **family.values}
    if family.other_parts:
        values = {"text_config": values, **family.other_parts}
    # Tests change configurations.
    config: PreTrainedConfig = AutoConfig.for_model(family.model_type, **deepcopy(values))
    return config


def library_class(config: PreTrainedConfig) -> Any:
    """What loads all parts of a model."""
    if config.get_text_config() is config:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


@dataclass(frozen=True)
class _Written:
    """A checkpoint that this process has written, and the state of torch's generator behind its weights."""

    directory: Path
    generator: torch.Tensor


_written: dict[tuple[type[PreTrainedConfig], str, int], _Written] = {}


@functools.cache
def _templates() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="specray-checkpoints-")


def write_model(directory: Path, config: PreTrainedConfig, *, seed: int) -> Path:
    """Writes random float32 weights and a toy tokenizer; returns the directory.

    Equal models are made once in a process, and copied.
    """
    key = (type(config), config.to_json_string(use_diff=False), seed)
    if key not in _written:
        template = Path(_templates().name, str(len(_written)))
        _make_model(template, config, seed)
        _written[key] = _Written(template, torch.get_rng_state())
    shutil.copytree(_written[key].directory, directory, dirs_exist_ok=True)
    torch.set_rng_state(_written[key].generator)
    return directory


def _make_model(directory: Path, config: PreTrainedConfig, seed: int) -> None:
    torch.manual_seed(seed)
    model = library_class(config).from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            # Norm weights and biases are ones and zeros otherwise, and then a forgotten one goes unseen.
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            # Wide enough to change what is chosen.
            tensor.add_(0.2 * torch.randn_like(tensor))
    model.save_pretrained(directory)
    write_tokenizer(directory, config.get_text_config().vocab_size)


def write_tokenizer(directory: Path, vocab_size: int, *, prefix: str = "") -> None:
    """A tokenizer of ``vocab_size`` words: ``<s>``, ``</s>``, then ``w2``, ``w3``, ..."""
    vocab = {"<s>": 0, "</s>": 1, **{f"{prefix}w{i}": i for i in range(2, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(directory)


def reference_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The library's own model, with its own attention; loaded once in a process for equal files."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    key = (digest.digest(), dtype)
    if key not in _loaded:
        loads = library_class(AutoConfig.from_pretrained(directory))
        _loaded[key] = loads.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    return deepcopy(_loaded[key])


_loaded: dict[tuple[bytes, torch.dtype], Any] = {}


@contextmanager
def changing_tensors(directory: Path, name: str = "model.safetensors") -> Iterator[dict[str, torch.Tensor]]:
    """A checkpoint's tensors, which are written again with what the block did to them."""
    tensors = load_file(directory / name)
    yield tensors
    save_file(tensors, directory / name, metadata={"format": "pt"})


def change_config(directory: Path, **values: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))


def read_by_library(values: dict[str, Any], directory: Path) -> Any:
    (directory / "config.json").write_text(json.dumps(values))
    return AutoConfig.from_pretrained(directory, local_files_only=True)


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits ``[len(token_ids), vocab_size]`` of a plain forward without a cache."""
    logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    return logits


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What the library's ``generate`` appends to the prompt at temperature 0, end-of-sequence ignored.

    Asked once in a process for equal weights, configuration and prompt.
    """
    key = (type(model), _digest(model), tuple(prompt), num_tokens)
    if key not in _generated:
        _generated[key] = _greedy(model, prompt, num_tokens)
    return list(_generated[key])


_generated: dict[tuple[type, bytes, tuple[int, ...], int], list[int]] = {}


def _digest(model: Any) -> bytes:
    """Of all that decides what a model computes."""
    digest = hashlib.sha256(f"{model.config.to_json_string(use_diff=False)} {model.dtype}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=1,
    )
    generated: list[int] = output[0, len(prompt) :].tolist()
    return generated
