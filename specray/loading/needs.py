"""Estimates what a model takes, by its files and caches, before it is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from specray.checkpoint_digest import WEIGHT_FILES
from specray.config import EMBEDDED, Config, EngineConfig, ModelConfig
from specray.demo.paths import demo_draft_path, demo_target_path
from specray.loading.table import ModelEntry, Room

_GIB: Final = 2.0**30
_PROCESS_BYTES: Final = 0.35 * _GIB
"""Bytes of a process without weights and caches: torch and compilers."""
_WEIGHTS_FACTOR: Final = 1.25
"""Bytes in memory per byte of the files of weights, as measured for the pair of real size."""
_CPU_CACHE_GIB: Final = 1.0
"""GiB of a block cache on a CPU that are allocated at the start where nothing is said."""


def needs_of(config: Config, *, has_own_draft: bool = True) -> Room:
    """What a pair takes at least: its targets, and one draft where it is its own."""
    scaling = config.router.autoscaling
    num_targets = config.router.num_replicas if scaling is None else max(1, scaling.min_replicas)
    room = Room()
    for _ in range(num_targets):
        room += _engine_needs(config.target, demo_target_path())
    if has_own_draft and config.draft.has_replicas:
        room += _engine_needs(config.draft, demo_draft_path())
    return room


def entry_of(config: Config, model: ModelConfig, num_measured_bytes: int | None = None) -> ModelEntry:
    """What a table of models has to know of one.

    Args:
        num_measured_bytes: that it was seen to take when it was loaded before.
    """
    needs = needs_of(config.of_model(model.name), has_own_draft=model.draft.pool is None)
    if model.memory_gib is not None:
        needs = replace(needs, memory_bytes=model.memory_gib * _GIB)
    elif num_measured_bytes is not None:
        needs = replace(needs, memory_bytes=num_measured_bytes)
    return ModelEntry(
        name=model.name,
        needs=needs,
        is_measured=num_measured_bytes is not None,
        has_fixed_needs=model.memory_gib is not None,
        pinned=model.pinned,
        keep_alive_s=model.keep_alive_s,
        priority=model.priority,
    )


def _engine_needs(engine: EngineConfig, embedded: Path) -> Room:
    ranks = engine.tensor_parallel_size
    if engine.num_gpus:
        return Room(ranks * _PROCESS_BYTES, ranks * engine.num_gpus)
    directory = embedded if engine.model == EMBEDDED else Path(engine.model)
    files = directory.iterdir() if directory.is_dir() else ()
    weights = sum(file.stat().st_size for file in files if file.suffix in WEIGHT_FILES)
    cache_gib = _CPU_CACHE_GIB if engine.cache_memory_gib == "auto" else engine.cache_memory_gib
    return Room(_WEIGHTS_FACTOR * weights + ranks * (_PROCESS_BYTES + cache_gib * _GIB))
