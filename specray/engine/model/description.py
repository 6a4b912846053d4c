"""Describes a model before its weights are loaded, or says why it cannot be served.

Neither torch nor transformers is imported for a model that ``families.config_json`` understands: the process
that starts a service checks its models so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specray.config import EMBEDDED, EngineConfig
from specray.demo.paths import demo_draft_path, demo_target_path
from specray.engine.model.checkpoint.layer_formats import StoredFormat
from specray.engine.model.checkpoint.location import find_description, read_config
from specray.engine.model.checkpoint.stored_format import check_forward
from specray.engine.model.checkpoint.vocabulary import TrimmedHead, read_head
from specray.engine.model.checks.formats import CONFIG_KEYS, check_adapter, check_format
from specray.engine.model.decoder_config import HEAD, MODEL_TYPES, DecoderConfig
from specray.engine.model.families.config_json import read_decoder_config
from specray.engine.model.quantized.formats import PLAIN, WeightFormats
from specray.errors import ConfigError
from specray.gguf.light import check_has_safetensors
from specray.json_files import check_settings

if TYPE_CHECKING:
    from specray.engine.model.checkpoint.adapter import Adapter
    from specray.engine.model.library import LibraryConfig

DEFAULT_MAX_MODEL_LEN = 4096
_SHARED_FIELDS = (
    "num_key_value_heads",
    "num_attention_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_intermediate_size",
)
"""Numbers that the ranks of a group must be able to share."""
_REPEATED = frozenset({"num_key_value_heads", "mamba_n_groups", "n_groups"})
"""Fields of which several ranks of the decoder can have the same part."""


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """What to load."""

    path: str
    """Directory or hub id of the model."""
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    """Number of ranks; with more than one the default process group must have as many."""
    role: str | None = None
    """``draft`` or ``target``: whose settings errors name."""
    forward: str = "auto"
    """``auto``, ``decoder`` or ``hf``: which forward will run the model."""
    formats: WeightFormats = PLAIN
    """Formats of the weights."""
    adapter: str | None = None
    """Directory of a LoRA adapter that is merged into the weights; None: there is none."""
    vocabulary_ids: str | None = None
    """File with the token ids that the head keeps; None: all that it has."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the configuration says of a model."""

    directory: Path | None
    """Files of the checkpoint; None: they are not on this machine."""
    model_type: str
    vocab_size: int
    max_model_len: int
    """Tokens of the longest sequence that is served."""
    decoder: DecoderConfig | None
    """None: forward hf runs the model."""
    library: LibraryConfig | None
    """What transformers says; None: it was not asked."""
    head: TrimmedHead | None = None
    """What ``ModelArgs.vocabulary_ids`` leaves of the head; None: nothing is cut."""
    adapter: Adapter | None = None
    """What is merged into the weights; None: nothing."""
    stored: StoredFormat | None = None
    """Format of the files' quantised weights; None: they are plain."""
    mask_token_id: int | None = None
    """Mask token id of a draft that predicts several tokens at once (PARD); None: it has none."""
    has_recurrent_layers: bool = False
    """Some layers keep a state of each sequence, from which only a chain of draft tokens can go on."""


def model_path(config: EngineConfig, role: str) -> str:
    """The path or hub id that ``config.model`` means for a draft or a target."""
    if config.model != EMBEDDED:
        return config.model
    return str(demo_draft_path() if role == "draft" else demo_target_path())


def check_loadable(args: ModelArgs) -> int:
    """Reads everything but the weights, and returns the vocabulary's size. Raises as :func:`describe`."""
    return describe(args).vocab_size


def describe(args: ModelArgs) -> ModelDescription:
    """Reads the configuration; whatever can be said without the weights is said.

    Raises:
        ConfigError: the path or hub id does not exist, holds no safetensors or quantised ones, is no
            decoder-only language model or one that is not computed rightly over the cache, wants remote code,
            cannot serve ``max_model_len``, cannot have weights in ``formats``, or has a head with wrong ids
            or a mask that is no token, or the adapter cannot be merged; the message names the value and what
            is allowed.
    """
    described = _describe_model(args)
    described = replace(described, adapter=_adapter(args, described))
    args.formats.check(args.path, described.decoder, args.tensor_parallel_size)
    _check_trimmed(args, described)
    described = replace(described, mask_token_id=_mask(args, described))
    if args.vocabulary_ids is None:
        return described
    return replace(described, head=read_head(args.vocabulary_ids, described.vocab_size))


def _describe_model(args: ModelArgs) -> ModelDescription:
    directory = find_description(args.path)
    if directory is not None:
        check_settings(directory)
    if directory is not None and (args.adapter is None or Path(args.adapter) != directory):
        check_adapter(args.path, directory)
    values = None if directory is None else read_config(directory)
    if values is not None:
        stored = check_format(args.path, directory, values)
        plain = {name: value for name, value in values.items() if name not in CONFIG_KEYS}
        decoder = None if args.forward == "hf" else read_decoder_config(plain if stored else values)
        if decoder is not None:
            return _describe_decoder(args, directory, decoder, stored)
    return _describe_through_library(args, directory)


def _describe_decoder(
    args: ModelArgs, directory: Path | None, decoder: DecoderConfig, stored: StoredFormat | None
) -> ModelDescription:
    limit = decoder.max_position_embeddings
    max_model_len = _max_model_len(args, limit)
    _check_shards(args, _shared_fields(decoder), has_decoder=True)
    return ModelDescription(
        directory,
        decoder.model_type,
        decoder.vocab_size,
        max_model_len,
        decoder=decoder,
        library=None,
        stored=stored,
    )


def _describe_through_library(args: ModelArgs, directory: Path | None) -> ModelDescription:
    """Describes a model as transformers reads its configuration; its import takes seconds."""
    from specray.engine.model import library

    with library.plain_layers(args.path):
        return _describe_with(library, args, directory)


def _describe_with(library: Any, args: ModelArgs, directory: Path | None) -> ModelDescription:
    config = library.load_config(args.path, directory)
    max_model_len = _max_model_len(args, config.max_model_len)
    if args.tensor_parallel_size > 1 and not config.can_be_shared(args.forward):
        raise ConfigError(
            f"{_size_setting(args)} is {args.tensor_parallel_size}; "
            f"model type {config.model_type!r} allows only 1"
        )
    decoder = library.check_served(args.path, config, forward=args.forward, max_model_len=max_model_len)
    fields = {name: config.by_layer(name) for name in _SHARED_FIELDS}
    if decoder is not None:
        fields = _shared_fields(decoder)
    _check_shards(args, fields, has_decoder=decoder is not None)
    check_forward(args.path, config.stored, has_decoder=decoder is not None)
    if decoder is None:
        check_has_safetensors(args.path, "forward hf")
    return ModelDescription(
        directory,
        config.model_type,
        config.vocab_size,
        max_model_len,
        decoder=decoder,
        library=config,
        stored=config.stored,
        has_recurrent_layers=config.has_recurrent_layers,
    )


def _shared_fields(decoder: DecoderConfig) -> dict[str, int | None]:
    fields = {name: getattr(decoder, name) for name in _SHARED_FIELDS}
    return fields | ({} if decoder.recurrent is None else decoder.recurrent.shared_fields)


def _adapter(args: ModelArgs, described: ModelDescription) -> Adapter | None:
    if args.adapter is None:
        return None
    from specray.engine.model.checkpoint.adapter import read_adapter

    adapter = read_adapter(args.adapter)
    if described.decoder is not None:
        decoder = described.decoder
        # The files may have a head of its own where the configuration says that it is tied.
        adapter.placed({HEAD: (decoder.num_logits, decoder.hidden_size), **decoder.weight_shapes()})
    elif args.tensor_parallel_size > 1:
        raise ConfigError(
            f"target.adapter is {args.adapter!r} and {_size_setting(args)} {args.tensor_parallel_size}; "
            f"model type {described.model_type!r}, which forward hf runs, allows them one at a time"
        )
    return adapter


def _check_trimmed(args: ModelArgs, described: ModelDescription) -> None:
    decoder = described.decoder
    num_rows = getattr(described.library and described.library.text, "draft_vocab_size", None)
    if decoder is not None:
        num_rows = decoder.draft_vocab_size
    elif args.vocabulary_ids is not None and args.tensor_parallel_size > 1:
        raise ConfigError(
            f"draft.vocabulary_ids is {args.vocabulary_ids} and {_size_setting(args)} "
            f"{args.tensor_parallel_size}; model type {described.model_type!r} allows them one at a time"
        )
    if num_rows is None:
        return
    if decoder is None:
        problem = f"allowed: model types {', '.join(sorted(MODEL_TYPES))}, with forward auto or decoder"
    elif args.role == "target":
        problem = "allowed: for a draft alone"
    elif num_rows > described.vocab_size:
        problem = f"allowed: at most its vocab_size, {described.vocab_size}"
    elif args.vocabulary_ids is not None:
        problem = "allowed: without draft.vocabulary_ids"
    else:
        return
    raise ConfigError(f"model {args.path!r}: draft_vocab_size is {num_rows}; {problem}")


def _mask(args: ModelArgs, described: ModelDescription) -> int | None:
    """The mask token that the configuration names. Raises ConfigError for one that is no token."""
    values = None if described.directory is None else read_config(described.directory)
    if values is None and described.library is not None:
        values = vars(described.library.text)
    mask = None if values is None else values.get("pard_token")
    if mask is None or (type(mask) is int and 0 <= mask < described.vocab_size):
        return mask
    raise ConfigError(f"model {args.path!r}: pard_token is {mask}; allowed: 0..{described.vocab_size - 1}")


def _max_model_len(args: ModelArgs, limit: int | None) -> int:
    if args.max_model_len is None:
        return min(limit or DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_MODEL_LEN)
    if limit is not None and args.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {args.max_model_len}; model {args.path!r} allows at most {limit}"
        )
    return args.max_model_len


def _check_shards(args: ModelArgs, fields: Mapping[str, Any], *, has_decoder: bool) -> None:
    """Raises ConfigError if the ranks cannot share each layer; the decoder's may repeat heads of keys."""
    size = args.tensor_parallel_size
    for field, value in fields.items():
        can_repeat = has_decoder and field in _REPEATED
        # By layer in Gemma 3n.
        for number in sorted(set(value)) if isinstance(value, (list, tuple)) else [value]:
            if number is None or number % size == 0 or (can_repeat and size % number == 0):
                continue
            allowed = f"{field} of {number}{' or be a multiple of it' if can_repeat else ''}"
            raise ConfigError(f"{_size_setting(args)} is {size}, which must divide the model's {allowed}")


def _size_setting(args: ModelArgs) -> str:
    return f"{args.role}.tensor_parallel_size" if args.role else "tensor_parallel_size"
