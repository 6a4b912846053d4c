"""What of this machine decides how a known model's draft is served, found without torch."""

from __future__ import annotations

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
NVIDIA_CONTROL = Path("/dev/nvidiactl")
"""Device file of NVIDIA's driver."""
_INT8_FEATURES = frozenset({"avx2", "fma", "f16c"})
"""Features of a processor without which there are no kernels for quantised weights."""


def has_int8_kernels() -> bool:
    """Whether this processor runs the kernels of quantised weights; False: unknown, too."""
    try:
        lines = CPU_INFO.read_text("utf-8").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return set(flags.split()) >= _INT8_FEATURES


def has_nvidia_gpu() -> bool:
    return NVIDIA_CONTROL.exists()
