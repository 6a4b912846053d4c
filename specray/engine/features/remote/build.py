"""Loads a drafter into the draft's process: its checkpoint, and what it shares with a target elsewhere.

Of the target only the tables are read that the checkpoint has not: the token embedding, the head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specray.config import Config, DraftConfig
from specray.engine.attention.select import DEFAULT_BLOCK_SIZE
from specray.engine.device import choose_device, hardware_of, num_threads_for, use_cores, use_device
from specray.engine.features.base import FeatureDrafter, FeatureStore, TargetParts, TargetShape
from specray.engine.features.block.layout import BlockLayout
from specray.engine.features.loader import Layout, drafter_name, load_drafter, read_drafter
from specray.engine.features.parts import DraftHead, read_embedding, read_head, target_shape
from specray.engine.model.loader import DecoderSource, LoadedModel, load_model
from specray.engine.model.operators import Operators, cpu_operators, cuda_operators
from specray.engine.model.quantized.formats import PLAIN
from specray.engine.runner.assembly import DTYPES, model_args
from specray.engine.runner.gpu_claim import claim_gpu, name_of, warn_of_turns
from specray.engine.runner.memory import CudaMemory, cache_bytes, naming
from specray.engine.visibility import MAX_TREE_ROWS
from specray.engine_info import PROTOCOL_VERSION, EngineInfo
from specray.errors import ConfigError
from specray.types import Overlap

_LEAST_BLOCK_SIZE = 2
"""Tokens of a block: those of the health check have one."""


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter that is ready to draft for a target elsewhere."""

    drafter: FeatureDrafter
    store: FeatureStore
    info: EngineInfo
    device: torch.device
    num_token_ids: int
    """Token ids up to the tokenizer's last one."""


def load_drafter_alone(config: Config) -> LoadedDrafter:
    """Loads the target's drafter for the draft's process.

    Raises:
        ConfigError: names the setting, its value and what is allowed.
    """
    draft, path = config.draft, config.target.drafter
    assert path is not None, "the configuration was checked"
    use_cores(draft.cores)
    device = choose_device(draft)
    use_device(device)
    if device.type == "cuda":
        claim_gpu(draft, "draft", name_of(device))
        warn_of_turns(draft, "draft")
    dtype = DTYPES[draft.dtype]
    # Whoever shards or quantises the target, its files are the same.
    most = draft.max_model_len or config.target.max_model_len
    args = replace(model_args(config.target, "target", 1), formats=PLAIN, max_model_len=most)
    shape = target_shape(args)
    layout = read_drafter(path, args, shape, dtype)
    kind = layout.one_pass_kind
    if kind is not None and config.speculation.overlap not in (Overlap.SERIAL, "auto"):
        raise ConfigError(
            f"target.drafter {path!r} is {kind} and speculation.overlap is "
            f"{config.speculation.overlap!s}; allowed: auto, serial (it does not go on from its own output)"
        )
    loaded = load_model(args, dtype=dtype, device=device)
    if not isinstance(loaded.source, DecoderSource):
        raise ConfigError(
            f"draft.model is 'remote-features' and target.model {args.path!r} is run by forward hf; allowed: "
            "a target that specray's decoder covers (others have the drafter beside them: draft.model "
            "'features')"
        )
    torch.set_num_threads(draft.num_threads or num_threads_for(layout.num_weights * dtype.itemsize))
    operators, own = _operators(dtype, device), DraftHead.of(config.target, shape.vocab_size)
    info = _info(draft, layout, loaded, shape)
    parts = TargetParts(
        shape,
        read_embedding(loaded.source, dtype) if layout.reads_embedding else _unread,
        read_head(loaded.source, operators, own, dtype, device) if layout.reads_head else _unread,
        operators,
        dtype,
        device,
        info.max_model_len,
        info.num_blocks,
        info.block_size,
        own.token_ids,
    )
    with naming(lambda: f"draft.cache_memory_gib is {draft.cache_memory_gib}; lower it"):
        drafter = load_drafter(layout, parts)
        like = torch.empty(0, dtype=dtype, device=device)
        store = FeatureStore(info.num_blocks, info.block_size, layout.feature_size, like=like)
    return LoadedDrafter(drafter, store, info, device, loaded.num_token_ids)


def _operators(dtype: torch.dtype, device: torch.device) -> Operators:
    if device.type != "cpu":
        return cuda_operators(dtype, device)
    return cpu_operators(dtype, torch.get_num_threads())


def _unread(rows: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a drafter with a table of its own reads no other")


def _info(config: DraftConfig, layout: Layout, loaded: LoadedModel, shape: TargetShape) -> EngineInfo:
    default = loaded.max_model_len if loaded.device.type == "cpu" else DEFAULT_BLOCK_SIZE
    block_size = max(_LEAST_BLOCK_SIZE, config.block_size or default)
    return EngineInfo(
        role="draft",
        model=drafter_name(layout),
        vocab_size=loaded.vocab_size,
        tokenizer_fingerprint=loaded.tokenizer_fingerprint,
        block_size=block_size,
        num_blocks=_num_blocks(config, layout, loaded, shape, block_size),
        max_model_len=loaded.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        protocol_version=PROTOCOL_VERSION,
        dtype=config.number_format,
        feature_drafter=drafter_name(layout),
        feature_size=layout.feature_size,
        hardware=hardware_of(loaded.device),
        lacks_outcomes=layout.one_pass_kind is not None,
    )


def _num_blocks(
    config: DraftConfig, layout: Layout, loaded: LoadedModel, shape: TargetShape, block_size: int
) -> int:
    """Blocks of features and K/V: for every sequence, the branches of its trees, and the health check.

    Raises:
        ConfigError: the memory is too little for one sequence.
    """
    item_bytes = loaded.dtype.itemsize
    memory = CudaMemory(loaded.device) if loaded.device.type == "cuda" else None
    num_tables = layout.reads_embedding + layout.reads_head
    weights = layout.num_weights + num_tables * shape.vocab_size * shape.hidden_size
    reserved = item_bytes * (weights + layout.num_step_numbers(config.max_num_batched_tokens))
    reserved += layout.mask_bytes(loaded.max_model_len, item_bytes)
    if isinstance(layout, BlockLayout):
        reserved += layout.logit_bytes(config.max_num_seqs, shape.vocab_size)
    num_bytes = cache_bytes(config, memory, shape.vocab_size, lambda: None, reserved)
    affordable = num_bytes // (block_size * layout.bytes_per_token(item_bytes))
    needed = -(-(loaded.max_model_len + MAX_TREE_ROWS) // block_size) + 1
    if affordable < needed:
        raise ConfigError(
            f"draft.cache_memory_gib is {config.cache_memory_gib}, room for {affordable} blocks of "
            f"{block_size} tokens; allowed: at least {needed} blocks, one sequence of {loaded.max_model_len} "
            "tokens with a tree behind it and a block for the health check"
        )
    return min(affordable, config.max_num_seqs * (needed - 1) + 1)
