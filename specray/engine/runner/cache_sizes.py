"""Shares the memory of the cache out: states of recurrent layers, snapshots of them, and blocks."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from specray.config import DraftConfig, EngineConfig, TargetConfig
from specray.engine.cache.blocks import BlockCache, bytes_per_token
from specray.engine.group.parallel import ParallelContext
from specray.engine.inputs import SequenceInput
from specray.engine.runner.memory import CudaMemory, DrafterMemory, cache_bytes
from specray.engine.runner.runner import ModelRunner, RunnerInfo
from specray.engine.step import CacheShape, Forward
from specray.errors import ConfigError

_SNAPSHOT_SHARE = 4
"""Divisor of the cache's memory: the share of snapshots, if nothing is said."""
_MOST_SNAPSHOTS = 1024
"""Snapshots at most; those of a small model would be more than can be looked through when one must go."""
_GIB = 2**30


class CacheSizes(NamedTuple):
    """What the cache holds."""

    num_blocks: int
    num_snapshots: int
    """Room for states that are kept for other sequences."""


def choose_sizes(
    config: EngineConfig, info: RunnerInfo, shape: CacheShape, num_bytes: int, drafter_memory: DrafterMemory
) -> CacheSizes:
    """Shares ``num_bytes`` out.

    Raises:
        ConfigError: they do not hold the states, the snapshots asked for, and one sequence's blocks.
    """
    per_token = drafter_memory.bytes_per_token + bytes_per_token(shape, info.dtype)
    per_block = info.block_size * per_token
    per_sequence = -(-info.max_model_len // info.block_size)
    state_bytes = _state_bytes(config, shape, info, num_bytes)
    left = num_bytes - state_bytes
    num_snapshots = _num_snapshots(config, shape, info, num_bytes, left - per_sequence * per_block)
    snapshot_bytes = num_snapshots * snapshot_bytes_of(shape, info)
    affordable = (left - snapshot_bytes) // per_block
    if affordable < per_sequence:
        needed = per_sequence * per_block / _GIB
        found = f", for which {num_bytes / _GIB:.3f} GiB are left" * (config.cache_memory_gib == "auto")
        states = "", ""
        if state_bytes:
            kept = f" and {num_snapshots} snapshots of them" * (num_snapshots > 0)
            states = (
                f", of which the states of recurrent layers{kept} take "
                f"{(state_bytes + snapshot_bytes) / _GIB:.3f} GiB",
                "; allowed: more memory, or a lower max_num_seqs or max_model_len"
                + ", or a lower snapshot_memory_gib" * (num_snapshots > 0),
            )
        raise ConfigError(
            f"cache_memory_gib is {config.cache_memory_gib}{found}{states[0]}; one sequence of max_model_len "
            f"{info.max_model_len} needs {needed:.3f} GiB{states[1]}"
        )
    return CacheSizes(min(affordable, config.max_num_seqs * per_sequence), num_snapshots)


def snapshot_bytes_of(shape: CacheShape, info: RunnerInfo) -> int:
    """Bytes of one snapshot on this rank; 0: there are none."""
    return sum(each.num_snapshot_bytes(info.dtype.itemsize) for each in shape.states)


def _num_snapshots(
    config: EngineConfig, shape: CacheShape, info: RunnerInfo, num_bytes: int, spare_bytes: int
) -> int:
    """Snapshots that memory is set aside for: as asked for, or a quarter if one sequence fits beside them."""
    each = snapshot_bytes_of(shape, info)
    if each == 0 or not isinstance(config, TargetConfig | DraftConfig) or not config.prefix_cache:
        return 0
    wanted = config.snapshot_memory_gib if isinstance(config, TargetConfig) else "auto"
    if wanted != "auto":
        return min(_MOST_SNAPSHOTS, int(wanted * _GIB) // each)
    return min(_MOST_SNAPSHOTS, max(0, min(num_bytes // _SNAPSHOT_SHARE, spare_bytes)) // each)


def _state_bytes(config: EngineConfig, shape: CacheShape, info: RunnerInfo, cache_bytes: int) -> int:
    """Bytes of all states of recurrent layers. Raises ConfigError where they leave the cache no room."""
    # Who builds an engine has added one sequence to those of the setting, for its check.
    own = sum(each.num_bytes(info.max_open, info.dtype.itemsize) for each in shape.states)
    found = info.num_state_slots * own
    if found > cache_bytes:
        raise ConfigError(
            f"cache_memory_gib is {config.cache_memory_gib}, {cache_bytes / _GIB:.3f} GiB; the states of "
            f"recurrent layers of {info.num_state_slots - 1} sequences and one more take "
            f"{found / _GIB:.3f} GiB; allowed: more memory, or a lower max_num_seqs"
        )
    return found


def cache_bytes_for(
    config: EngineConfig,
    info: RunnerInfo,
    forward: Forward,
    parallel: ParallelContext | None,
    drafter_memory: DrafterMemory,
) -> int:
    memory = CudaMemory(info.device) if info.device.type == "cuda" else None
    peak_step = partial(run_peak_step, config, info, forward)
    reserved = drafter_memory.weight_bytes + drafter_memory.step_bytes
    found = cache_bytes(config, memory, info.vocab_size, peak_step, reserved)
    # Ranks must have equally many blocks, and the leader's own memory is not the others'.
    return found if parallel is None or memory is None else parallel.least(found)


def run_peak_step(config: EngineConfig, info: RunnerInfo, forward: Forward) -> None:
    """Runs a step of as many rows as there can be, with the logits of all, over a cache of its own."""
    num_rows, longest = config.max_num_batched_tokens, info.max_model_len
    lengths = [min(longest, num_rows - start) for start in range(0, num_rows, longest)]
    per_sequence = -(-longest // info.block_size)
    inputs = [
        SequenceInput(
            [0] * length,
            0,
            range(index * per_sequence, (index + 1) * per_sequence),
            length,
            state_slot=index,
        )
        for index, length in enumerate(lengths)
    ]
    cache = BlockCache(
        forward.cache_shape,
        num_blocks=len(lengths) * per_sequence,
        block_size=info.block_size,
        dtype=info.dtype,
        device=info.device,
        num_state_slots=len(lengths),
    )
    ModelRunner(forward, cache, info).run(inputs)
