"""Loads a causal LM of transformers, and says clearly why when it cannot.

Weights come from safetensors only, code from the installed library only, and a path that exists never touches
the network.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specray.errors import ConfigError

DEFAULT_MAX_MODEL_LEN = 4096
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
# Beyond the original context these choose their frequencies by the longest sequence of a batch, so a
# sequence's tokens would depend on its neighbours; up to the original context they are constant.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """What to load, and where to."""

    path: str
    """Directory, or hub id."""
    dtype: torch.dtype
    device: torch.device
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    """With more than one the default process group must be initialised and have this many ranks."""
    role: str | None = None
    """``draft`` or ``target``: whose settings errors name."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be lowered or run, with what the engine must know of it."""

    model: PreTrainedModel
    config: PreTrainedConfig  # of the text part
    name: str
    vocab_size: int
    max_model_len: int
    tokenizer_fingerprint: str
    dtype: torch.dtype
    device: torch.device


def load_model(args: ModelArgs) -> LoadedModel:
    """Loads configuration, tokenizer and weights.

    Raises:
        ConfigError: the path or hub id does not exist, holds no safetensors, is no decoder-only language
            model, wants remote code, or cannot serve ``max_model_len``; the message names the value and what
            is allowed.
    """
    source = _local_options(args.path)
    config = _load_config(args.path, source)
    text_config = config.get_text_config()
    max_model_len = _max_model_len(text_config, args.path, args.max_model_len)
    _check_shards(text_config, args.tensor_parallel_size, role=args.role)
    fingerprint = tokenizer_fingerprint(args.path)
    model = _load_weights(args, config, source)
    return LoadedModel(
        model=model,
        config=text_config,
        name=Path(args.path).name,
        vocab_size=int(text_config.vocab_size),
        max_model_len=max_model_len,
        tokenizer_fingerprint=fingerprint,
        dtype=args.dtype,
        device=args.device,
    )


def tokenizer_fingerprint(path: str) -> str:
    """SHA-256 over the vocabulary sorted by id: two models with the same mean the same text by a token id.

    Raises:
        ConfigError: there is no tokenizer at ``path``.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **_local_options(path))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {path!r} has no tokenizer that can be loaded: {error}") from None
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token_id}:{token}\n".encode())
    return digest.hexdigest()


def _local_options(path: str) -> dict[str, Any]:
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"model {path!r} is a directory without config.json")
        if not any(directory.glob("*.safetensors")):
            raise ConfigError(
                f"model {path!r} holds no *.safetensors file; other weight formats are not loaded"
            )
        return {"local_files_only": True}
    if directory.exists():
        raise ConfigError(f"model {path!r} is a file; a directory or a hub id is expected")
    if not _HUB_ID.fullmatch(path):
        raise ConfigError(f"model {path!r} does not exist, and is not a hub id such as 'owner/name'")
    return {}


def _load_config(path: str, source: dict[str, Any]) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False, **source)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {path!r} cannot be loaded: {error}") from None
    _check_architecture(path, config)
    return config


def _check_architecture(path: str, config: PreTrainedConfig) -> None:
    architecture = ", ".join(getattr(config, "architectures", None) or [type(config).__name__])
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"model {path!r} is {architecture}; allowed: decoder-only causal language models")


def _max_model_len(config: PreTrainedConfig, path: str, wanted: int | None) -> int:
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
        limit = rope.get("original_max_position_embeddings") or limit
    if wanted is None:
        return min(limit or DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_MODEL_LEN)
    if limit is not None and wanted > limit:
        raise ConfigError(f"max_model_len is {wanted}; model {path!r} allows at most {limit}")
    return wanted


def _check_shards(config: PreTrainedConfig, size: int, *, role: str | None) -> None:
    """Raises ConfigError when ``size`` ranks cannot share each layer of a model."""
    if size == 1:
        return
    name = f"{role}.tensor_parallel_size" if role else "tensor_parallel_size"
    if not config.base_model_tp_plan:
        raise ConfigError(f"{name} is {size}; model type {config.model_type!r} allows only 1")
    for field in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
        value = getattr(config, field, None)
        if value is not None and value % size:
            raise ConfigError(f"{name} is {size}, which must divide the model's {field} of {value}")


def _load_weights(args: ModelArgs, config: PreTrainedConfig, source: dict[str, Any]) -> PreTrainedModel:
    options: dict[str, Any] = dict(source)
    if args.tensor_parallel_size > 1:
        options["distributed_config"] = DistributedConfig(tp_size=args.tensor_parallel_size, tp_plan="auto")
    try:
        model_and_report: Any = AutoModelForCausalLM.from_pretrained(
            args.path,
            config=config,
            dtype=args.dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model {args.path!r} cannot be loaded: {error}") from None
    model, report = model_and_report
    if report["missing_keys"]:
        # The library fills them with random numbers.
        raise ConfigError(f"model {args.path!r} lacks weights: {', '.join(sorted(report['missing_keys']))}")
    if args.tensor_parallel_size == 1:
        model = model.to(args.device)
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def check_loadable(path: str, *, max_model_len: int | None, num_ranks: int, role: str) -> int:
    """Reads the configuration only, and returns the vocabulary's size.

    Raises:
        ConfigError: as :func:`load_model`, as far as the weights do not matter.
    """
    config = _load_config(path, _local_options(path)).get_text_config()
    _max_model_len(config, path, max_model_len)
    _check_shards(config, num_ranks, role=role)
    return int(config.vocab_size)
