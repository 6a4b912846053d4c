"""Choice of device, CPU cores and threads of a process."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from specray.config import EngineConfig
from specray.errors import ConfigError, EngineLostError

_ENTRIES_PER_THREAD = 65_536
_SMALL_MODEL_BYTES = 8 * 2**20
_CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
CGROUP_MEMORY = Path("/sys/fs/cgroup")
MEMORY_INFO = Path("/proc/meminfo")


def num_usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by the container's CPU limit. At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = _CGROUP_CPU_LIMIT.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def cores_per_rank(config: EngineConfig) -> int:
    """Cores for each rank, of those that an engine may use on this machine, where all its ranks are; >= 1."""
    cores = len(config.cores) if config.cores is not None else num_usable_cores()
    return max(1, cores // config.tensor_parallel_size)


def available_memory() -> int:
    """Bytes that the system could give now, within the container's limit; 0 where that is not known."""
    try:
        lines = dict(line.split(":", 1) for line in MEMORY_INFO.read_text().splitlines())
        available = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 0
    try:
        limit, used = (int((CGROUP_MEMORY / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no such container, or one without a limit, "max"
        return available
    return max(0, min(available, limit - used))


def give_back_memory() -> None:
    """Gives the system what this process's allocator keeps of freed memory, such as a compiler's.

    After a model was loaded these are some 70 MB, which no later step needs at once.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's alone
        trim(0)


def visible_gpus() -> tuple[str, ...]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them, in its order."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return tuple(name.strip() for name in listed.split(",") if name.strip())
    return tuple(str(index) for index in range(torch.cuda.device_count()))


def show_gpus(names: Sequence[str], local_rank: int) -> None:
    """Makes CUDA show this process some GPUs, in this order, and says which of its node's ranks it is.

    CUDA reads the names once, when it is first asked for anything.

    Raises:
        EngineLostError: it has been asked, and shows others.
    """
    listed = ",".join(names)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_begun and shown != listed:
        raise EngineLostError(f"this process shows the GPUs {shown!r}, but its group now has {listed!r}")
    os.environ["CUDA_VISIBLE_DEVICES"] = listed
    os.environ["LOCAL_RANK"] = str(local_rank)


def use_device(device: torch.device) -> None:
    """Makes a GPU the current one of this thread, for all that takes the current one; others need nothing.

    Raises:
        ConfigError: CUDA does not show it.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"device is 'cuda', but GPU {device.index or 0} of {', '.join(visible_gpus())} cannot be used: "
            f"{error}"
        ) from error


def use_cores(cores: Sequence[int] | None) -> None:
    """Keeps this thread, and the threads that it starts from now on, on some CPU cores; None: on any.

    Raises:
        ConfigError: a core does not exist, is not ours to use, or the system cannot pin threads.
    """
    if cores is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"cores is {tuple(cores)}; this system cannot pin threads, leave it out")
    usable = os.sched_getaffinity(0)
    if not usable.issuperset(cores):
        raise ConfigError(f"cores is {tuple(cores)}; allowed here: {sorted(usable)}")
    os.sched_setaffinity(0, cores)


def hardware_of(device: torch.device) -> tuple[str, ...]:
    """Names of what this thread computes on, each with its machine: its cores, or the device."""
    machine = platform.node()
    if device.type == "cuda":
        return (f"{machine}/gpu/{visible_gpus()[device.index or 0]}",)
    if device.type != "cpu":
        return (f"{machine}/{device}",)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(f"{machine}/core/{core}" for core in sorted(cores))


def num_threads_for(num_weight_bytes: int) -> int:
    """CPU threads that pay for a model of this size.

    Measured on 2 cores: a draft of 2.5 MB runs as fast on one thread as on two, and leaves the other core to
    the target; a target of 19 MB gains a tenth from the second thread, one of 390 MB a third.
    """
    return 1 if num_weight_bytes < _SMALL_MODEL_BYTES else num_usable_cores()


def num_threads_for_logits(vocab_size: int, num_threads: int) -> int:
    """Threads of torch in an engine whose forwards do not use them: for copying logits and drawing from them.

    A thread more for every 64 Ki entries of the vocabulary. At the end of each region of torch's a thread
    looks for more work for a while, on a core that the forward's own threads need: measured on 2 cores,
    Verify calls over 8 Ki entries took 4 % less time with one thread, and where it spins for longer (outside
    the service) 9 rows took 18 ms with two and 13 with one.
    """
    return max(1, min(num_threads, vocab_size // _ENTRIES_PER_THREAD))


def choose_device(config: EngineConfig, gpu_index: int | None = None) -> torch.device:
    """The device that the configuration means here. Raises ConfigError for CUDA where there is none.

    Args:
        gpu_index: index of the GPU among those that this process sees; None: the current one.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but no CUDA device is available; allowed here: 'cpu' or 'auto'")
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if not use_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if gpu_index is None else gpu_index)
