"""Estimates what a model takes, by its files and caches, before it is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

from specray.adapter_folders import ADAPTER_FILES
from specray.checkpoint_digest import WEIGHT_FILES
from specray.config import EMBEDDED, Config, DraftConfig, EngineConfig, ModelConfig, TargetConfig
from specray.demo.paths import demo_draft_path, demo_target_path
from specray.loading.table import ModelEntry, Room

_GIB: Final = 2.0**30
_PROCESS_BYTES: Final = 0.35 * _GIB
"""Bytes of a process without weights and caches: torch and compilers."""
_WEIGHTS_FACTOR: Final = 1.25
"""Bytes in memory per byte of the files of weights, as measured for the pair of real size."""
_MAX_HEADER_BYTES: Final = 100 << 20
"""Bytes of a file's header, at most."""
_ADAPTED: Final = ("_proj.weight", "_proj_with_mqa.weight")
"""Ends of the names of weights that adapters may change."""
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
    adapters = _adapter_bytes(engine, directory)
    return Room(_WEIGHTS_FACTOR * weights + adapters + ranks * (_PROCESS_BYTES + cache_gib * _GIB))


def _adapter_bytes(engine: EngineConfig, directory: Path) -> int:
    """Bytes of as many adapters of the highest rank as a target may load, or of a draft's own files."""
    if isinstance(engine, DraftConfig):
        files = [Path(path) / ADAPTER_FILES[1] for path in engine.adapters.values()]
        return sum(file.stat().st_size for file in files if file.is_file())
    if not isinstance(engine, TargetConfig) or engine.adapters is None:
        return 0
    numbers = sum(map(_numbers_by_rank, directory.glob("*.safetensors")))
    size = 4 if engine.dtype == "float32" else 2
    return engine.adapters.max_loaded * engine.adapters.max_rank * numbers * size


def _numbers_by_rank(file: Path) -> int:
    """Numbers that a rank of an adapter has for the projections in a file; 0 where it cannot be read."""
    try:
        with file.open("rb") as stream:
            size = min(int.from_bytes(stream.read(8), "little"), _MAX_HEADER_BYTES)
            header = json.loads(stream.read(size))
    except (OSError, ValueError):
        return 0
    return sum(
        sum(tensor["shape"])
        for name, tensor in header.items()
        if name.endswith(_ADAPTED) and "expert" not in name
    )
