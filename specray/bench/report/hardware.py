"""Names the hardware that an engine runs on."""

from __future__ import annotations

import torch

from specray.bench.report.provenance import cpu_name
from specray.config import EngineConfig
from specray.engine.device import choose_device, cores_per_rank


def hardware_name(config: EngineConfig) -> str:
    """Returns the name of one device: the GPU, or the CPU with the cores of a rank."""
    device = choose_device(config)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = cores_per_rank(config)
    return f"{cpu_name()}, {cores} core{'s' if cores > 1 else ''}"
