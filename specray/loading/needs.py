"""Estimates what a model takes, by its files and caches, before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from specray.checkpoint_digest import WEIGHT_FILES
from specray.config import EMBEDDED, Config, EngineConfig
from specray.demo.paths import demo_draft_path, demo_target_path
from specray.loading.table import Room

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


def _engine_needs(engine: EngineConfig, embedded: Path) -> Room:
    ranks = engine.tensor_parallel_size
    if engine.num_gpus:
        return Room(ranks * _PROCESS_BYTES, ranks * engine.num_gpus)
    directory = embedded if engine.model == EMBEDDED else Path(engine.model)
    files = directory.iterdir() if directory.is_dir() else ()
    weights = sum(file.stat().st_size for file in files if file.suffix in WEIGHT_FILES)
    cache_gib = _CPU_CACHE_GIB if engine.cache_memory_gib == "auto" else engine.cache_memory_gib
    return Room(_WEIGHTS_FACTOR * weights + ranks * (_PROCESS_BYTES + cache_gib * _GIB))
