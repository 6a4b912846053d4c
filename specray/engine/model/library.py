"""The way to a model through transformers: for configurations and forwards that only the library knows.

Importing it takes seconds and brings all of the library's modelling code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.utils.hub import cached_file

from specray.engine.model.checkpoint.headers import read_headers
from specray.engine.model.checkpoint.layer_formats import StoredFormat
from specray.engine.model.checks.architecture import check_architecture
from specray.engine.model.checks.formats import check_format, check_tensors
from specray.engine.model.checks.messages import one_line, plain_reason
from specray.engine.model.checks.modalities import (
    auto_class,
    drop_other_parts,
    is_language_model,
    needs_other_parts,
)
from specray.engine.model.checks.refusals import has_recurrent_layers, refusal_of, window_refusal
from specray.engine.model.checks.values import check_values
from specray.engine.model.checks.weights import check_finite, check_report
from specray.engine.model.decoder_config import DecoderConfig
from specray.engine.model.families.from_library import can_lower, decoder_config_of
from specray.engine.model.hf_forward import HfForward
from specray.errors import ConfigError

# Beyond the original context these choose their frequencies by the longest sequence of a batch, so a
# sequence's tokens would depend on its neighbours; up to the original context they are constant.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")

_KNOWN_AS = {"kimi_k2": "deepseek_v3"}
"""Types that come with code of their own, by those of the library that compute the same."""
_SEVERAL_RANKS = frozenset(
    {
        "afmoe",
        "apertus",
        "arcee",
        "aria_text",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_neox",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_moe",
        "hy_v3",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "kolibri1",
        "laguna",
        "llama",
        "llama4_text",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minicpm3",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nanochat",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "vaultgemma",
        "youtu",
    }
)
"""Model types that several ranks of forward hf were seen to compute rightly (``make zoo``).

Not among them are types without a plan for tensor parallelism in transformers (``gpt2``, ``opt``, ...), those
whose layers differ in sizes (``gemma4_text``), those that are refused on one rank (``nemotron``), those
that were not tried (the text of ``phi4_multimodal`` among them), and ``gemma3n_text``, whose logits two ranks
compute wrongly without a word, off by 0.9 of their deviation.
"""


@dataclass(frozen=True, slots=True)
class LibraryConfig:
    """A configuration as transformers reads it."""

    whole: PreTrainedConfig
    text: PreTrainedConfig
    """The text part; of a model for text alone, the whole."""
    stored: StoredFormat | None = None
    """Format of quantised weights; None: they are plain."""

    @property
    def model_type(self) -> str:
        return str(self.text.model_type)

    @property
    def vocab_size(self) -> int:
        return int(self.text.vocab_size)

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence that the model can serve; None: it has no limit."""
        limit: int | None = getattr(self.text, "max_position_embeddings", None)
        rope = getattr(self.text, "rope_parameters", None) or {}
        # Of a model whose layers rotate in different ways, by their type.
        for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            original = each.get("original_max_position_embeddings")
            if each.get("rope_type") in _BATCH_DEPENDENT_ROPE and original:
                limit = original if limit is None else min(limit, original)
        return limit

    def by_layer(self, name: str) -> Any:
        """A number of the text part; a list where layers have their own, None where there is none."""
        if not self.text.is_heterogeneous:
            return getattr(self.text, name, None)
        numbers = [getattr(layer, name, None) for layer in self.text.per_layer_config]
        return [number for number in numbers if number is not None]

    def has_decoder(self, forward: str) -> bool:
        """Whether the decoder runs it; ``forward`` is the setting."""
        if forward == "hf" or not can_lower(self.text):
            return False
        # The library's multimodal models leave out what their text part's own model does to its logits.
        return not self.is_multimodal or getattr(self.text, "logits_scaling", 1) == 1

    @property
    def is_multimodal(self) -> bool:
        return self.whole is not self.text

    @property
    def _is_tied(self) -> bool:
        """Whether the head may be the embedding: one of both parts says so, and the files say otherwise."""
        return any(bool(getattr(part, "tie_word_embeddings", False)) for part in (self.whole, self.text))

    def decoder_config(self, max_model_len: int) -> DecoderConfig:
        """The decoder's, where it runs the model. KeyError, TypeError, ValueError: senseless values."""
        config = decoder_config_of(self.text, max_model_len=max_model_len)
        return replace(config, tie_word_embeddings=self._is_tied)

    def can_be_shared(self, forward: str) -> bool:
        """Whether several ranks can compute it together; ``forward`` as of :meth:`has_decoder`."""
        if self.has_decoder(forward):
            return True
        if needs_other_parts(self.whole) or self.text.is_heterogeneous:
            return False
        return self.text.model_type in _SEVERAL_RANKS

    @property
    def has_recurrent_layers(self) -> bool:
        return has_recurrent_layers(self.text)

    @property
    def weights_entry(self) -> str | None:
        return getattr(self.whole, "transformers_weights", None)


def load_config(path: str, directory: Path | None) -> LibraryConfig:
    """Reads a configuration, and refuses checkpoints in formats that are not read.

    Args:
        directory: the model's files; None: the library finds them.

    Raises:
        ConfigError: it cannot be read, or is not one of a decoder-only language model.
    """
    where, options = _where(path, directory)
    try:
        values, _ = PreTrainedConfig.get_config_dict(where, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {path!r} cannot be loaded: {one_line(error)}") from None
    stored = check_format(path, directory, dict(values))
    check_values(path, values)
    try:
        config: PreTrainedConfig
        if (known := _KNOWN_AS.get(values.get("model_type", ""))) is not None:
            own = {name: value for name, value in values.items() if name not in ("auto_map", "model_type")}
            config = AutoConfig.for_model(known, **own)
        else:
            config = AutoConfig.from_pretrained(where, trust_remote_code=False, **options)
        text = config.get_text_config()
        if getattr(text, "rope_parameters", None):
            # Its models do so: what stands next to the rotary parameters may count before them.
            text.standardize_rope_params()
    except Exception as error:  # Values that a configuration class refuses raise all kinds.
        reason = one_line(error) if isinstance(error, (OSError, ValueError)) else plain_reason(error)
        raise ConfigError(f"model {path!r} cannot be loaded: {reason}") from None
    _check_causal(path, config)
    return LibraryConfig(config, text, stored)


@contextmanager
def plain_layers(path: str) -> Iterator[None]:
    """Raises ConfigError in place of the library's error where layers have values of their own."""
    try:
        yield
    except AmbiguousGlobalPerLayerAttributeError as error:
        raise ConfigError(f"model {path!r}: {plain_reason(error)}") from None


def check_served(
    path: str, config: LibraryConfig, *, forward: str, max_model_len: int
) -> DecoderConfig | None:
    """Chooses the forward: the decoder's configuration; None: forward hf.

    Raises:
        ConfigError: neither computes the model rightly over the cache.
    """
    refusal = refusal_of(config.text, max_model_len=max_model_len)
    if refusal is not None:
        raise ConfigError(f"model {path!r}: {refusal}")
    if config.has_decoder(forward):
        try:
            decoder = config.decoder_config(max_model_len)
        except (KeyError, TypeError, ValueError) as error:  # Of rotary embeddings, as the library's model.
            raise ConfigError(f"model {path!r} cannot be loaded: {one_line(error)}") from None
        refusal = window_refusal(config.text, decoder.windows, max_model_len=max_model_len)
        if refusal is not None:
            raise ConfigError(f"model {path!r}: model type {config.model_type!r} is not supported: {refusal}")
        return decoder
    if config.has_recurrent_layers:
        values = "" if forward == "hf" else " with other values than the configuration's"
        raise ConfigError(
            f"model {path!r}: model type {config.model_type!r} is not supported: it has recurrent layers, "
            f"which the decoder alone runs; allowed: forward auto or decoder{values}"
        )
    try:
        check_architecture(config.whole, max_model_len=max_model_len, make_forward=HfForward)
    except ConfigError as error:
        raise ConfigError(f"model {path!r}: {error}") from None
    return None


def load_model(
    path: str,
    directory: Path | None,
    config: LibraryConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tensor_parallel_size: int,
) -> PreTrainedModel:
    """Loads the library's own model, sharded over the default process group's ranks.

    Raises:
        ConfigError: weights are missing, unknown or not finite, or the files are damaged.
    """
    where, options = _where(path, directory)
    if tensor_parallel_size > 1:
        options["distributed_config"] = DistributedConfig(tp_size=tensor_parallel_size, tp_plan="auto")
    try:
        model_and_report: Any = auto_class(config.whole).from_pretrained(
            where,
            config=config.whole,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, ImportError, SafetensorError) as error:
        raise ConfigError(f"model {path!r} cannot be loaded: {one_line(error)}") from None
    model, report = model_and_report
    if not options.get("local_files_only") and (snapshot := _snapshot(path)) is not None:
        check_tensors(path, read_headers(snapshot))
    check_report(path, report, config.text)
    check_finite(path, model)
    if tensor_parallel_size == 1:
        model = model.to(device)
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    if tensor_parallel_size == 1:
        drop_other_parts(loaded)
    return loaded


def trim_head(path: str, model: PreTrainedModel, rows: torch.Tensor) -> None:
    """Leaves some rows of a model's head, so that it computes their logits alone.

    Raises:
        ConfigError: the head is no linear layer.
    """
    untyped: Any = model
    head = untyped.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise ConfigError(
            f"draft.vocabulary_ids cannot trim model {path!r}, whose head is a {type(head).__name__}; "
            "allowed: models with a linear head"
        )
    index = rows.to(head.weight.device)
    trimmed = torch.nn.Linear(head.in_features, len(index), bias=False, device="meta")
    trimmed.weight = torch.nn.Parameter(head.weight[index], requires_grad=False)
    if head.bias is not None:
        trimmed.bias = torch.nn.Parameter(head.bias[index], requires_grad=False)
    untyped.set_output_embeddings(trimmed)


def _where(path: str, directory: Path | None) -> tuple[str, dict[str, Any]]:
    """What the library loads from, and its options; a hub id as such, since files may be missing yet."""
    if directory is not None and Path(path).expanduser() == directory:
        return str(directory), {"local_files_only": True}
    return path, {}


def _snapshot(path: str) -> Path | None:
    found = cached_file(path, "config.json", local_files_only=True)
    return None if found is None else Path(found).parent


def _check_causal(path: str, config: PreTrainedConfig) -> None:
    architecture = ", ".join(getattr(config, "architectures", None) or [type(config).__name__])
    if not is_language_model(config):
        raise ConfigError(f"model {path!r} is {architecture}; allowed: decoder-only causal language models")
