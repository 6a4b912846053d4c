"""Names the hardware that an engine runs on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from specray.config import EngineConfig
from specray.engine.runner.device import choose_device, cores_per_rank

_CPU_INFO = Path("/proc/cpuinfo")


def hardware_name(config: EngineConfig) -> str:
    """Returns the name of one device: the GPU, or the CPU with the cores of a rank."""
    device = choose_device(config)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = cores_per_rank(config)
    return f"{_cpu_name()}, {cores} core{'s' if cores > 1 else ''}"


def _cpu_name() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
