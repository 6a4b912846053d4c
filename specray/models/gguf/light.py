"""Writes light checkpoints: what a GGUF file's header says, and a link to the file with the weights."""

from __future__ import annotations

import json
from pathlib import Path

from specray.gguf.header import GgufHeader
from specray.gguf.light import WEIGHTS
from specray.gguf.type_sizes import BFLOAT16, FLOAT16, FLOAT32
from specray.models.gguf.ends import end_token_ids, write_ends
from specray.models.gguf.families import read_config
from specray.models.gguf.sizes import Config
from specray.models.gguf.tokenizer_files import write_tokenizer
from specray.tokenization.fingerprint import record_vocabulary

_MODEL_TYPES = frozenset(
    {
        "gemma3_text",
        "glm4_moe",
        "gpt_oss",
        "lfm2",
        "llama",
        "olmoe",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
    }
)
"""Types of models that the decoder runs from their files."""
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
"""Keys of config.json that it does not compute."""
_TENSOR_TYPES = frozenset({FLOAT32, FLOAT16, BFLOAT16, 2, 3, 6, 7, 8, 12, 13, 14, 20, 23, 39})
"""Numbers of the types of tensors that it reads."""


def is_light(header: GgufHeader, config: Config) -> bool:
    """Whether engines run a file's model from the file itself, so that no weight need be converted."""
    is_covered = config["model_type"] in _MODEL_TYPES and not any(config.get(cap) for cap in _SOFT_CAPS)
    return is_covered and {tensor.type_number for tensor in header.tensors} <= _TENSOR_TYPES


def write_light(gguf: Path, header: GgufHeader, destination: Path) -> None:
    """Writes the directory, which must not exist.

    Raises:
        UnfitError: the file says something that is not read.
    """
    config, _ = read_config(gguf, header)
    destination.mkdir()
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    written = write_tokenizer(gguf, destination)
    ends = end_token_ids(header.values, written.vocabulary, written.special_ids)
    write_ends(destination / "generation_config.json", ends)
    (destination / WEIGHTS).symlink_to(gguf.absolute())
    record_vocabulary(destination)
