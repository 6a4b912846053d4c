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
from transformers.utils.hub import cached_file

from specray.engine.model.checks.architecture import check_architecture
from specray.engine.model.checks.formats import check_adapter, check_format, check_tensors, read_headers
from specray.engine.model.checks.messages import first_line, one_line
from specray.engine.model.checks.refusals import refusal_of
from specray.engine.model.checks.weights import check_finite, check_report
from specray.engine.model.hf_forward import HfForward
from specray.engine.model.loaded import LoadedModel
from specray.engine.model.lowering import can_lower
from specray.errors import ConfigError
from specray.tokenization.files import check_tokenizer_files

DEFAULT_MAX_MODEL_LEN = 4096
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
# Beyond the original context these choose their frequencies by the longest sequence of a batch, so a
# sequence's tokens would depend on its neighbours; up to the original context they are constant.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")

_ONE_RANK = frozenset({"gemma3n_text"})
"""Model types that several ranks have not been seen to compute rightly."""


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """What to load, and where to."""

    path: str
    """Directory or hub id of the model."""
    dtype: torch.dtype
    device: torch.device
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    """Number of ranks; with more than one the default process group must have as many."""
    role: str | None = None
    """``draft`` or ``target``: whose settings errors name."""
    forward: str = "auto"
    """``auto``, ``decoder`` or ``hf``: which forward will run the model."""


@dataclass(frozen=True, slots=True)
class _Description:
    """What the configuration says of a model."""

    directory: Path | None
    """Files of the checkpoint; None: they are not on this machine."""
    source: dict[str, Any]
    """The library's options that say where to load from."""
    config: PreTrainedConfig
    text_config: PreTrainedConfig
    max_model_len: int


def load_model(args: ModelArgs) -> LoadedModel:
    """Loads configuration, tokenizer and weights; whatever can be said without the weights is said first.

    Raises:
        ConfigError: the path or hub id does not exist, holds no safetensors or quantised ones, is no
            decoder-only language model or one that is not computed rightly over the cache, wants remote code,
            cannot serve ``max_model_len``, or has weights that are missing, unknown or not finite; the
            message names the value and what is allowed.
    """
    described = _describe(args)
    fingerprint = tokenizer_fingerprint(args.path)
    model = _load_weights(args, described)
    return LoadedModel(
        model=model,
        config=described.text_config,
        name=Path(args.path).name,
        vocab_size=int(described.text_config.vocab_size),
        max_model_len=described.max_model_len,
        tokenizer_fingerprint=fingerprint,
        dtype=args.dtype,
        device=args.device,
    )


def check_loadable(args: ModelArgs) -> int:
    """Reads everything but the weights, and returns the vocabulary's size.

    Raises:
        ConfigError: as :func:`load_model`, as far as the weights do not matter.
    """
    return int(_describe(args).text_config.vocab_size)


def _describe(args: ModelArgs) -> _Description:
    path = args.path
    source = _local_options(path)
    directory = Path(path).expanduser() if source else None
    values = _raw_config(path, source)
    check_format(path, directory, values)
    config = _load_config(path, source)
    text_config = config.get_text_config()
    max_model_len = _max_model_len(text_config, path, args.max_model_len)
    _check_shards(text_config, args.tensor_parallel_size, role=args.role)
    refusal = refusal_of(text_config, max_model_len=max_model_len)
    if refusal is not None:
        raise ConfigError(f"model {path!r}: {refusal}")
    if args.forward == "hf" or not can_lower(text_config):
        _check_forward(path, config, max_model_len)
    return _Description(directory, source, config, text_config, max_model_len)


def _check_forward(path: str, config: PreTrainedConfig, max_model_len: int) -> None:
    try:
        check_architecture(config, max_model_len=max_model_len, make_forward=HfForward)
    except ConfigError as error:
        raise ConfigError(f"model {path!r}: {error}") from None


def tokenizer_fingerprint(path: str) -> str:
    """SHA-256 over the vocabulary sorted by id: two models with the same mean the same text by a token id.

    Raises:
        ConfigError: there is no tokenizer at ``path``.
    """
    source = _local_options(path)
    where = Path(path).expanduser() if source else path
    check_tokenizer_files(where)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **source)
    except Exception as error:  # Damaged files and missing packages raise all kinds.
        raise ConfigError(
            f"model {path!r} has no tokenizer that can be loaded: {first_line(error)}"
        ) from None
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token_id}:{token}\n".encode())
    return digest.hexdigest()


def _local_options(path: str) -> dict[str, Any]:
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            check_adapter(path, directory)
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


def _raw_config(path: str, source: dict[str, Any]) -> dict[str, Any]:
    """What config.json holds, of which the library drops what it does not know."""
    where = str(Path(path).expanduser()) if source else path
    try:
        values, _ = PreTrainedConfig.get_config_dict(where, **source)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {path!r} cannot be loaded: {one_line(error)}") from None
    return dict(values)


def _load_config(path: str, source: dict[str, Any]) -> PreTrainedConfig:
    where = str(Path(path).expanduser()) if source else path
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(where, trust_remote_code=False, **source)
    except Exception as error:  # Values that a configuration class refuses raise all kinds.
        raise ConfigError(f"model {path!r} cannot be loaded: {one_line(error)}") from None
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
    if not config.base_model_tp_plan or config.model_type in _ONE_RANK:
        raise ConfigError(f"{name} is {size}; model type {config.model_type!r} allows only 1")
    for field in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
        value = getattr(config, field, None)
        # By layer in Gemma 3n.
        for number in sorted(set(value)) if isinstance(value, (list, tuple)) else [value]:
            if number is not None and number % size:
                raise ConfigError(f"{name} is {size}, which must divide the model's {field} of {number}")


def _load_weights(args: ModelArgs, described: _Description) -> PreTrainedModel:
    options: dict[str, Any] = dict(described.source)
    if args.tensor_parallel_size > 1:
        options["distributed_config"] = DistributedConfig(tp_size=args.tensor_parallel_size, tp_plan="auto")
    try:
        model_and_report: Any = AutoModelForCausalLM.from_pretrained(
            args.path if described.directory is None else described.directory,
            config=described.config,
            dtype=args.dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, ImportError, SafetensorError) as error:
        raise ConfigError(f"model {args.path!r} cannot be loaded: {one_line(error)}") from None
    model, report = model_and_report
    if described.directory is None and (snapshot := _snapshot(args.path)) is not None:
        check_tensors(args.path, read_headers(snapshot))
    check_report(args.path, report, described.text_config)
    check_finite(args.path, model)
    if args.tensor_parallel_size == 1:
        model = model.to(args.device)
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def _snapshot(path: str) -> Path | None:
    """Directory with the files of a hub id, once they have been loaded."""
    found = cached_file(path, "config.json", local_files_only=True)
    return None if found is None else Path(found).parent
