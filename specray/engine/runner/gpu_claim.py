"""Keeps two engines from taking one GPU by accident: each process claims its own, on this machine.

Those that share one on purpose are told what that costs.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import tempfile
from pathlib import Path

import torch

from specray.config import EngineConfig
from specray.engine.device import visible_gpus
from specray.errors import ConfigError

_log = logging.getLogger(__name__)

_MPS_PIPES = "/tmp/nvidia-mps"
"""Directory of the pipes to the MPS daemon, unless CUDA_MPS_PIPE_DIRECTORY names another."""


def claim_gpu(config: EngineConfig, role: str, gpu: str, *, directory: Path | None = None) -> None:
    """Takes a GPU for this process until it ends: alone, or with others where ``num_gpus`` is below 1.

    Args:
        gpu: what identifies it on this machine.
        directory: where claims are noted; None: the system's temporary one.

    Raises:
        ConfigError: another process has it; the message names the process.
    """
    path = (directory or Path(tempfile.gettempdir())) / f"specray-gpu-{gpu}.lock"
    try:
        descriptor = _open(path)
    except OSError as error:
        _log.warning("%s cannot be opened: nobody will know that GPU %s is in use: %s", path, gpu, error)
        return
    kind = fcntl.LOCK_SH if config.shares_gpu else fcntl.LOCK_EX
    try:
        # A lock of the process: a second engine in one process is no accident.
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        holders = " and ".join(line for line in _lines(descriptor) if _process_of(line) != os.getpid())
        raise ConfigError(
            f"{role}.ray_actor_options: num_gpus is {config.num_gpus or 'not set'}, but GPU {gpu} is taken "
            f"by {holders or 'another process'}; allowed: another GPU, or num_gpus below 1 for every engine "
            "that shares it"
        ) from None
    lines = dict.fromkeys((*_lines(descriptor), f"the {role} of process {os.getpid()}"))
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, "\n".join(lines).encode(), 0)


def warn_of_turns(config: EngineConfig, role: str) -> None:
    """Warns of an engine on a part of a GPU, where nothing lets its process compute next to others."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_PIPES)
    if config.shares_gpu and not (pipes / "control").exists():
        _log.warning(
            "%s.ray_actor_options: num_gpus is %g, but no MPS daemon is found in %s: the processes on this "
            "GPU take turns, and one waits while another computes; docs/gpu.md says how to start it",
            role,
            config.num_gpus,
            pipes,
        )


def _lines(descriptor: int) -> list[str]:
    text = os.pread(descriptor, 4096, 0).decode("utf-8", "replace")
    return [line for line in text.splitlines() if _is_running(_process_of(line))]


def _process_of(line: str) -> int:
    number = line.rpartition(" ")[2]
    return int(number) if number.isdecimal() else 0


def _is_running(process: int) -> bool:
    if process <= 0:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@functools.cache
def _open(path: Path) -> int:
    """Opens the file once: the lock is lost when any descriptor of the process is closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if os.fstat(descriptor).st_uid == os.getuid():
        os.fchmod(descriptor, 0o666)
    return descriptor


def name_of(device: torch.device) -> str:
    """What identifies a CUDA device on its machine, in every process."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return visible_gpus()[device.index or 0] if uuid is None else str(uuid)
