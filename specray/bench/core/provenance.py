"""Where the figures of a report come from: machine, commit, command and date."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from specray import __version__
from specray.config import EngineConfig

_CPU_INFO = Path("/proc/cpuinfo")


def provenance() -> Iterator[str]:
    """Yields lines of Markdown that say under which conditions this process measured."""
    today = datetime.datetime.now(datetime.UTC).date()
    # Also where it was started as a module.
    command = shlex.join(["specray", *sys.argv[1:]])
    yield f"{today:%d %B %Y}; {machine()}; commit `{commit()}`."
    yield ""
    yield "```bash"
    yield command
    yield "```"


def machine() -> str:
    """Processor, cores that this process may use, and memory of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu_name()}, {cores} cores, {memory_gib:.0f} GiB, {platform.system()}"


def cpu_name() -> str:
    """Name of the processor, as it names itself."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def hardware_name(config: EngineConfig) -> str:
    """Name of one device of an engine: the GPU, or the CPU with the cores of a rank."""
    import torch

    from specray.engine.device import choose_device, cores_per_rank

    device = choose_device(config)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = cores_per_rank(config)
    return f"{cpu_name()}, {cores} core{'s' if cores > 1 else ''}"


def commit() -> str:
    """The commit of the sources, with a mark where they were changed; the version outside a checkout."""
    folder = Path(__file__).resolve().parents[3]
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10.0,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return f"specray {__version__}"
    return found.stdout.strip()
