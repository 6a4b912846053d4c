"""Loads a model for a forward: its files for the decoder, or the library's model for forward hf.

Weights come from safetensors and GGUF files only, code from the installed library only, and a path that
exists never touches the network.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from specray.engine.cuda.codes.layout import held_bytes
from specray.engine.model.checkpoint.adapter import AdaptedWeights
from specray.engine.model.checkpoint.gguf_weights import GgufWeights
from specray.engine.model.checkpoint.headers import read_headers
from specray.engine.model.checkpoint.location import find_weights
from specray.engine.model.checkpoint.mxfp4_weights import Mxfp4Weights
from specray.engine.model.checkpoint.names import as_stored, decoder_names, without_identities
from specray.engine.model.checkpoint.safetensors_files import SafetensorsWeights
from specray.engine.model.checkpoint.source import NamedWeights, WeightSource
from specray.engine.model.checkpoint.stored_format import MXFP4
from specray.engine.model.checkpoint.stored_weights import StoredWeights
from specray.engine.model.checkpoint.vocabulary import TrimmedHead, stored_head, trimmed_shapes
from specray.engine.model.checks.formats import check_tensors
from specray.engine.model.checks.weights import check_places
from specray.engine.model.decoder_config import EMBEDDING, HEAD, DecoderConfig
from specray.engine.model.description import ModelArgs, ModelDescription, describe
from specray.engine.model.quantized.formats import WeightFormats
from specray.engine.model.quantized.operator_set import has_own_kernels
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.quantization import Quantization
from specray.errors import ConfigError
from specray.gguf.light import gguf_weights
from specray.tokenization.fingerprint import tokenizer_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecoderSource:
    """What the decoder is built from: its weights are read when it is."""

    config: DecoderConfig
    weights: WeightSource
    head: TrimmedHead | None = None
    """The rows of the head that are computed; None: all."""
    stored_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each weight that stays in a file's own bits."""
    stored_formats: tuple[str, ...] = ()
    """Names of their formats."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to become a forward, with what the engine must know of it."""

    source: DecoderSource | PreTrainedModel
    """A model of the library is there as it is, for forward hf."""
    name: str
    model_type: str
    vocab_size: int
    max_model_len: int
    tokenizer_fingerprint: str
    num_token_ids: int
    """Token ids up to the tokenizer's last one; the model's further ones only pad its weights."""
    num_weight_bytes: int
    """Bytes of all weights as they are held, those of other ranks included."""
    dtype: torch.dtype
    device: torch.device
    stored_formats: tuple[str, ...] = ()
    """Formats of the weights that stay in a file's own bits."""
    token_ids: NDArray[np.int64] | None = None
    """Token ids of the logits, ascending; None: all of the vocabulary."""
    mask_token_id: int | None = None
    """Mask token id of a draft that predicts several tokens at once (PARD); None: it has none."""
    directory: Path | None = None
    """Files of the checkpoint; None: only the library knows where they are."""


def load_model(args: ModelArgs, *, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Loads configuration, tokenizer and weights; whatever can be said without the weights is said first.

    The decoder's weights are found and checked by name and shape; their numbers are read by ``lower``.

    Raises:
        ConfigError: as ``describe``, or the tokenizer cannot be read, or weights are missing, unknown, of
            another shape or not finite; the message names the value and what is allowed.
    """
    described = describe(args)
    vocabulary = tokenizer_vocabulary(args.path, described.directory)
    source: DecoderSource | PreTrainedModel
    head = described.head
    if described.decoder is None:
        source = _library_model(args, described, dtype, device)
        num_weight_bytes = sum(weight.nbytes for weight in source.parameters())
    else:
        has_own_bits = args.formats.has_own_bits and has_own_kernels(device, dtype)
        formats = replace(args.formats, has_own_bits=has_own_bits)
        source = _decoder_source(args.path, described, described.decoder, dtype, device, formats)
        _tell_formats(args, described, source, dtype)
        head = source.head
        num_weight_bytes = args.formats.num_bytes(source.config, dtype.itemsize, source.stored_bytes)
    return LoadedModel(
        source=source,
        name=Path(args.path).name,
        model_type=described.model_type,
        vocab_size=described.vocab_size,
        max_model_len=described.max_model_len,
        tokenizer_fingerprint=vocabulary.fingerprint,
        num_token_ids=vocabulary.num_token_ids,
        num_weight_bytes=num_weight_bytes,
        dtype=dtype,
        device=device,
        stored_formats=source.stored_formats if isinstance(source, DecoderSource) else (),
        token_ids=None if head is None else head.token_ids,
        mask_token_id=described.mask_token_id,
        directory=described.directory,
    )


def _tell_formats(
    args: ModelArgs, described: ModelDescription, source: DecoderSource, dtype: torch.dtype
) -> None:
    is_light = described.directory is not None and gguf_weights(described.directory) is not None
    if source.stored_formats:
        size = sum(source.stored_bytes.values()) / 2**20
        _log.info("%s: %.0f MiB of weights stay in %s", args.path, size, ", ".join(source.stored_formats))
    elif (is_light or described.stored is not None) and args.formats.has_own_bits:
        name = str(dtype).removeprefix("torch.")
        _log.info("%s: the file's weights are dequantised to %s: no kernels for them here", args.path, name)


def _library_model(
    args: ModelArgs, described: ModelDescription, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    from specray.engine.model import library

    assert described.library is not None, "forward hf runs what the library has described"
    model = library.load_model(
        args.path,
        described.directory,
        described.library,
        dtype=dtype,
        device=device,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    if described.adapter is not None:
        described.adapter.merge(model)
    if described.head is not None:
        library.trim_head(args.path, model, torch.from_numpy(described.head.rows))
    return model


def _decoder_source(
    path: str,
    described: ModelDescription,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    formats: WeightFormats,
) -> DecoderSource:
    library = described.library
    entry = None if library is None else library.weights_entry
    directory = _directory(path, described)
    weights, config = open_weights(
        path, described, config, dtype=dtype, device=device, has_own_bits=formats.has_own_bits
    )
    config = match_names(weights, config, text_alone=library is not None and library.is_multimodal)
    expected = config.weight_shapes()
    if EMBEDDING not in weights.shapes:
        # Either would do where both are tied.
        expected[HEAD] = expected[EMBEDDING]
    found, head = weights.shapes, described.head
    if config.tie_word_embeddings:
        # A copy of the embedding.
        found = {name: shape for name, shape in found.items() if name != HEAD}
    if config.draft_vocab_size is not None:
        found = trimmed_shapes(found)
        head = stored_head(
            path, directory, num_rows=config.num_logits, vocab_size=config.vocab_size, entry=entry
        )
        if config.tie_word_embeddings:
            head = replace(head, rows=head.token_ids)
    check_places(path, found, expected, config if library is None else library.text)
    if head is not None:
        config = replace(config, draft_vocab_size=len(head.token_ids))
    adapter = described.adapter
    adapted = weights if adapter is None else AdaptedWeights(weights, adapter, expected)
    own = [
        name
        for name in weights.stored_bytes
        if (adapter is None or name not in adapter.layers)
        and formats.of_matrix(name) is Quantization.NONE
        and not config.is_decoded(name)
    ]
    return DecoderSource(
        config,
        adapted,
        head,
        {name: _held_bytes(weights.stored_formats[name], weights.stored_bytes[name], device) for name in own},
        tuple(sorted({weights.stored_formats[name] for name in own})),
    )


def open_weights(
    path: str,
    described: ModelDescription,
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    has_own_bits: bool,
) -> tuple[NamedWeights, DecoderConfig]:
    """Finds a checkpoint's weights, under the names that its files have.

    Returns:
        The weights, and the configuration in terms of which the files' numbers are.

    Raises:
        ConfigError: they are not on the hub, a file is missing or damaged, or its tensors do not fit the
            checkpoint's format.
    """
    directory = _directory(path, described)
    if (file := gguf_weights(directory)) is not None:
        weights = GgufWeights(path, file, config, dtype=dtype, device=device, has_own_bits=has_own_bits)
        return weights, weights.decoder_config(config)
    entry, stored = None if described.library is None else described.library.weights_entry, described.stored
    check_tensors(path, read_headers(directory), stored)
    if stored is None:
        return SafetensorsWeights(path, directory, dtype=dtype, device=device, entry=entry), config
    if stored.method == MXFP4:
        return Mxfp4Weights(
            path, directory, dtype=dtype, device=device, entry=entry, has_own_bits=has_own_bits
        ), config
    return StoredWeights(
        path,
        directory,
        stored,
        dtype=dtype,
        device=device,
        entry=entry,
        has_own_bits=has_own_bits,
        holds_all=device.type != "cpu",
    ), config


def _directory(path: str, described: ModelDescription) -> Path:
    entry = None if described.library is None else described.library.weights_entry
    directory = None if described.directory is None else find_weights(path, described.directory, entry)
    if directory is None:
        raise ConfigError(f"model {path!r} cannot be loaded: its safetensors files are not on the hub")
    return directory


def _held_bytes(format: str, num_bytes: int, device: torch.device) -> int:
    """Bytes that a weight takes on the device, which has ``num_bytes`` in its file."""
    if device.type == "cpu" or format not in set(BlockType):
        return num_bytes
    return held_bytes(BlockType(format), num_bytes)


def match_names(weights: NamedWeights, config: DecoderConfig, *, text_alone: bool = False) -> DecoderConfig:
    """Gives the files' tensors the names that the decoder knows, as the library does.

    Args:
        text_alone: as of ``names.decoder_names``.

    Returns:
        The configuration, corrected where it says that the head is tied and the files say that it is not.
    """
    names = decoder_names(weights.shapes, text_alone=text_alone)
    if config.experts is not None and config.experts.num_identities:
        names = without_identities(names, config.experts.num_experts)
    config = as_stored(config, {name: weights.shapes[stored] for name, stored in names.items()})
    if config.tie_word_embeddings and EMBEDDING not in names and HEAD in names:
        names[EMBEDDING] = names.pop(HEAD)
    weights.rename(names)
    weights.keep_wide(config.wide_weights())
    if config.tie_word_embeddings and HEAD in names and not _is_tied(weights):
        return replace(config, tie_word_embeddings=False)
    return config


def _is_tied(weights: NamedWeights) -> bool:
    """Whether the files' head, which need not be there, is the embedding."""
    if weights.shapes[HEAD] != weights.shapes[EMBEDDING]:
        return False
    return torch.equal(weights.read(HEAD), weights.read(EMBEDDING))
