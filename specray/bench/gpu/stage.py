"""Runs one stage as a process: reads its arguments from stdin and writes its result to a file."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from specray.config import EMBEDDED, Config, EngineConfig, TargetConfig, parse_config
from specray.environment import apply_thread_environment
from specray.errors import ConfigError, SpecrayError

MAX_MODEL_LEN: Final = 1024
_NUM_SEQUENCES: Final = 16


def models(size: str, directory: str, device: str) -> dict[str, Any]:
    """Makes the checkpoint of a size, and describes the device."""
    import torch
    import transformers

    from specray.bench.gpu.models import make_checkpoint

    began = time.perf_counter()
    path = make_checkpoint(size, Path(directory), device)
    is_cuda = device == "cuda"
    return {
        "path": str(path),
        "seconds": time.perf_counter() - began,
        "device": torch.cuda.get_device_name() if is_cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_cuda else None,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def forwards(path: str, device: str, dtype: str, is_tiny: bool) -> dict[str, Any]:
    """Times forwards in this process."""
    from specray.bench.gpu.forwards import TINY, ForwardLoad, measure

    values = {**_engine(path, device, dtype), "max_num_seqs": 2 * _NUM_SEQUENCES}
    return measure(EngineConfig.model_validate(values), TINY if is_tiny else ForwardLoad())


def sampling(device: str, is_tiny: bool) -> dict[str, Any]:
    """Times sampling alone in this process."""
    import torch

    from specray.bench.gpu.sampling import TINY, SamplingLoad, measure

    return measure(torch.device(device), TINY if is_tiny else SamplingLoad())


def attention(device: str, is_tiny: bool) -> dict[str, Any]:
    """Times attention alone in this process."""
    import torch

    from specray.bench.gpu.attention import TINY, AttentionLoad, measure

    return measure(torch.device(device), TINY if is_tiny else AttentionLoad())


def products(device: str, is_tiny: bool) -> dict[str, Any]:
    """Times products with weights in their own bits in this process."""
    import torch

    from specray.bench.gpu.products import TINY, ProductLoad, measure

    return measure(torch.device(device), TINY if is_tiny else ProductLoad())


def determinism(path: str, device: str, dtype: str, is_tiny: bool) -> dict[str, Any]:
    """Times steps with ``target.deterministic`` off and on in this process."""
    from specray.bench.gpu.determinism import TINY, DeterminismLoad, measure

    values = {**_engine(path, device, dtype), "max_num_seqs": 2 * _NUM_SEQUENCES, "attention": "auto"}
    return measure(TargetConfig.model_validate(values), TINY if is_tiny else DeterminismLoad())


def experts(device: str, is_tiny: bool) -> dict[str, Any]:
    """Times experts alone in this process."""
    import torch

    from specray.bench.gpu.experts import LARGE, TINY, ExpertLoad, measure
    from specray.engine.device import num_usable_cores

    on_cpu = ExpertLoad(num_threads=num_usable_cores())
    return measure(torch.device(device), TINY if is_tiny else LARGE if device == "cuda" else on_cpu)


def recurrent(device: str, is_tiny: bool) -> dict[str, Any]:
    """Times recurrent layers alone in this process."""
    import torch

    from specray.bench.gpu.recurrent import TINY, RecurrentLoad, measure

    return measure(torch.device(device), TINY if is_tiny else RecurrentLoad())


def proposals(path: str, device: str, dtype: str, is_tiny: bool) -> dict[str, Any]:
    """Times the proposals of a draft in this process."""
    from specray.bench.gpu.proposals import LARGE, TINY, ProposalLoad, measure

    values = {**_engine(path, device, dtype), "max_num_seqs": 2 * _NUM_SEQUENCES}
    workload = TINY if is_tiny else ProposalLoad() if path == EMBEDDED else LARGE
    return measure(EngineConfig.model_validate(values), workload)


def pair(path: str, device: str, draft_device: str, dtype: str, **load: Any) -> dict[str, Any]:
    """Serves prompts with draft and target as processes of their own."""
    from specray.bench.gpu.pair import measure

    return measure(pair_config(path, device, draft_device, dtype), **load)


def peer(path: str, num_prompts: int, **load: Any) -> dict[str, Any]:
    """Generates with transformers."""
    from specray.bench.gpu.pair import encoded_prompts
    from specray.bench.gpu.peer import measure
    from specray.demo.paths import demo_draft_path

    return measure(path, str(demo_draft_path()), encoded_prompts(path, num_prompts), **load)


def pair_config(path: str, device: str, draft_device: str, dtype: str) -> Config:
    """Makes the configuration of a pair for the checkpoint; prefix caches are off: prompts repeat."""
    target = {**_engine(path, device, dtype), "max_num_seqs": _NUM_SEQUENCES}
    draft = {**_engine(EMBEDDED, draft_device, dtype), "max_num_seqs": _NUM_SEQUENCES}
    return parse_config({"target": target, "draft": draft})


def _engine(path: str, device: str, dtype: str) -> dict[str, Any]:
    return {
        "model": path,
        "device": device,
        "dtype": dtype,
        "max_model_len": MAX_MODEL_LEN,
        "cache_memory_gib": 8.0,
        "prefix_cache": False,
        # On a CPU it takes the same path as on CUDA, so that it can be tried without one.
        "attention": "auto" if device == "cuda" else "gather",
    }


_STAGES: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    stage.__name__: stage
    for stage in (
        *(
            models,
            sampling,
            attention,
            products,
            experts,
            recurrent,
            proposals,
            forwards,
            determinism,
            pair,
            peer,
        ),
    )
}


def run_stage(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the stage's part of the report. Raises SpecrayError."""
    if arguments["device"] == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device is 'cuda', but torch sees no CUDA device; allowed here: cpu")
    return _STAGES[name](**arguments)


def main() -> int:
    """Runs ``stage.py NAME RESULT``; returns 0 if there is a result."""
    name, result = sys.argv[1:]
    apply_thread_environment()
    try:
        value = run_stage(name, json.load(sys.stdin))
    except SpecrayError as error:
        print(f"specray: {error}", file=sys.stderr)
        return 1
    Path(result).write_text(json.dumps(value), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
