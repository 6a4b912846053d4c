"""Thread pool of the CPU kernels; threads claim parts of a job, so none waits for a thread that has no core.

An OpenMP region ends when every thread has arrived. If another process occupies a core, each of a forward's
hundred regions waits for a scheduler time slice. Here the calling thread works through the parts itself,
helped by whichever threads are running, and waits only for parts that a helper has begun.

One 64-bit word holds the current job, its number of parts and the next part. A part is claimed by
compare-and-swap of the whole word, so a thread that read an older job's fields cannot claim a newer job's
part.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from llvmlite import ir
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic

from specray.engine.cpu.compiled import CompiledFunction
from specray.engine.cpu.simd import intrinsic_of, kernel

_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)
"""Signature of a kernel function: address of the arguments, part, number of parts, thread."""
_PROTOTYPE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)

# Byte offsets of the fields in the block that a thread pool shares, each on its own cache line.
_WORD = 0  # job << 32 | number of parts << 16 | next part
_FUNCTION = 64
_ARGS = 72
_NUM_DONE = 128  # parts that helpers have finished
_IS_CLOSED = 192
_SIZE = 200  # threads
# Byte offsets of a helper's own fields, from the block's beginning plus its number times this size.
_HELPER_SIZE = 256
_IS_ASLEEP = 0
_SEMAPHORE = 64  # sem_t

APART = 4096
"""Minimum distance in bytes between memory that two threads write often. A core prefetches up to the end of
an OS page and takes lines from the core writing there; sums of 64 rows side by side cost a tenth of the
products."""
MAX_PARTS = 1 << 15
"""Parts of a job, fewer than."""
_LAST_JOB = 0x7FFF_FFFF
_SPINS = 4_000
"""Polls of the word before a helper sleeps: about 50 us, longer than the interpreter needs between
kernels."""
_SPINS_BEFORE_YIELD = 1_000
_INT64, _INT32 = ir.IntType(64), ir.IntType(32)


class Kernel(CompiledFunction):
    """A compiled function that does one of several equal parts of a job.

    Args:
        name: see ``CompiledFunction``.
        num_args: number of 64-bit arguments at the address.
        make: returns the function of ``(args address, part, number of parts, thread)`` to compile.
    """

    __slots__ = ("num_args",)

    def __init__(self, name: str | None, num_args: int, make: Callable[[], Any]) -> None:
        super().__init__(name, _SIGNATURE, _PROTOTYPE, make)
        self.num_args = num_args


class Recorder(Protocol):
    """Records the jobs of a thread pool, to replay them."""

    def add(self, kernel: Kernel, args_address: int, num_parts: int) -> None: ...

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor for jobs to write to, now and in replays."""
        ...


class ThreadPool:
    """Threads that run kernels for one engine thread. Helpers sleep when there is no job.

    Args:
        size: number of threads including the caller's; reduced to 1 where there are no POSIX semaphores.
    """

    def __init__(self, size: int) -> None:
        self.size = size if _has_semaphores() else 1
        self.recorder: Recorder | None = None
        """Recorder of every job that runs while it is set."""
        self._num_jobs = 0
        self._control: int = 0
        self._lead_all = _lead_all_function().call
        if self.size == 1:
            return
        memory = np.zeros(self.size * _HELPER_SIZE + 64, dtype=np.uint8)
        control = memory.ctypes.data + -memory.ctypes.data % 64
        ctypes.c_int64.from_address(control + _SIZE).value = self.size
        for index in range(1, self.size):
            _libc().sem_init(_semaphore(control, index), 0, 0)
        self._control = control
        self._lead, help_ = _lead_function().call, _help_function().call
        helpers = [
            threading.Thread(
                target=help_, args=(control, index), name=f"specray-kernels-{index}", daemon=True
            )
            for index in range(1, self.size)
        ]
        for helper in helpers:
            helper.start()
        # Also runs at exit: no helper may read memory that is freed.
        weakref.finalize(self, _dismiss, memory, control, helpers)

    def run(self, kernel: Kernel, args_address: int, num_parts: int) -> None:
        """Runs a job and returns when all parts are done. Not thread-safe.

        Args:
            num_parts: number of parts; 1 runs on the calling thread alone.
        """
        if self.recorder is not None:
            self.recorder.add(kernel, args_address, num_parts)
        if num_parts == 1 or self.size == 1:
            for part in range(num_parts):
                kernel.call(args_address, part, num_parts, 0)
            return
        assert num_parts < MAX_PARTS, num_parts
        self._num_jobs = (self._num_jobs + 1) & _LAST_JOB
        self._lead(self._control, kernel.address, args_address, self._num_jobs << 32 | num_parts << 16)

    def run_all(self, jobs_address: int, num_jobs: int) -> None:
        """Runs jobs one after the other, like as many calls of ``run``. Not thread-safe.

        Args:
            jobs_address: address of int64 ``[num_jobs, 3]``: addresses of kernel and arguments, parts.
        """
        self._lead_all(self._control, jobs_address, num_jobs, self._num_jobs)
        self._num_jobs = (self._num_jobs + num_jobs) & _LAST_JOB

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor for jobs to write to, from the recorder while one is set."""
        if self.recorder is not None:
            return self.recorder.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)


def _dismiss(memory: Any, control: int, helpers: list[threading.Thread]) -> None:
    ctypes.c_int64.from_address(control + _IS_CLOSED).value = 1
    for index in range(1, len(helpers) + 1):
        _libc().sem_post(_semaphore(control, index))
    for helper in helpers:
        if helper is not threading.current_thread():
            helper.join(5.0)
    del memory


def _semaphore(control: int, helper: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(control + helper * _HELPER_SIZE + _SEMAPHORE)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def _has_semaphores() -> bool:
    return platform.system() == "Linux" and hasattr(_libc(), "sem_init")


# ---- code that the threads run


def _address(builder: Any, control: Any, offset: int) -> Any:
    return builder.inttoptr(builder.add(control, ir.Constant(_INT64, offset)), _INT64.as_pointer())


def _atomic(emit: Any, num_numbers: int, result: Any = types.int64) -> Any:
    """Makes an intrinsic that takes the control block's address and ``num_numbers`` int64."""
    return intrinsic_of(1 + num_numbers, types.int64, emit, result)


def _loader(offset: int) -> Any:
    return _atomic(lambda b, c: b.load_atomic(_address(b, c, offset), "seq_cst", 8), 0)


def _storer(offset: int) -> Any:
    def emit(builder: Any, control: Any, value: Any) -> None:
        builder.store_atomic(value, _address(builder, control, offset), "seq_cst", 8)

    return _atomic(emit, 1, types.void)


def _adder(offset: int) -> Any:
    return _atomic(lambda b, c, x: b.atomic_rmw("add", _address(b, c, offset), x, "seq_cst"), 1)


def _swap(builder: Any, control: Any, expected: Any, value: Any) -> Any:
    result = builder.cmpxchg(_address(builder, control, _WORD), expected, value, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(result, 1), _INT64)


def _pause(builder: Any, control: Any) -> None:
    if platform.machine() in ("x86_64", "AMD64"):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])


@intrinsic
def call_kernel(context: Any, function: Any, args: Any, part: Any, num_parts: Any, thread: Any) -> Any:
    """Runs one part of a kernel, by its address; for kernels."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT64] * 4)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), code


_load_word, _store_word, _swap_word = _loader(_WORD), _storer(_WORD), _atomic(_swap, 2)
_load_function, _store_function = _loader(_FUNCTION), _storer(_FUNCTION)
_load_args, _store_args = _loader(_ARGS), _storer(_ARGS)
_load_done, _store_done, _add_done = _loader(_NUM_DONE), _storer(_NUM_DONE), _adder(_NUM_DONE)
_is_closed, _load_size = _loader(_IS_CLOSED), _loader(_SIZE)
_is_asleep, _store_asleep = _loader(_IS_ASLEEP), _storer(_IS_ASLEEP)  # of a helper's fields
_relax = _atomic(_pause, 0, types.void)
_sem_post: Any = types.ExternalFunction("sem_post", types.int32(types.int64))
_sem_wait: Any = types.ExternalFunction("sem_wait", types.int32(types.int64))
_sem_trywait: Any = types.ExternalFunction("sem_trywait", types.int32(types.int64))
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())


@kernel()
def _take_parts(control: int, thread: int) -> int:
    """Runs parts of the current job until none is left; returns how many."""
    taken = 0
    while True:
        word = _load_word(control)
        num_parts, part = (word >> 16) & 0xFFFF, word & 0xFFFF
        if part >= num_parts:
            return taken
        function, args = _load_function(control), _load_args(control)
        if _swap_word(control, word, word + 1):
            call_kernel(function, args, part, num_parts, thread)
            taken += 1
            if thread:
                _add_done(control, 1)


@kernel()
def _lead(control: int, function: int, args: int, word: int) -> None:
    """Starts a job, works on it, and waits until the helpers have done the parts that they claimed."""
    # The previous job has no parts left, so nobody claims one while the fields change.
    _store_function(control, function)
    _store_args(control, args)
    _store_done(control, 0)
    _store_word(control, word)
    for index in range(1, _load_size(control)):
        helper = control + index * _HELPER_SIZE
        if _is_asleep(helper):
            _sem_post(helper + _SEMAPHORE)
    others = ((word >> 16) & 0xFFFF) - _take_parts(control, 0)
    spins = 0
    while _load_done(control) < others:
        spins += 1
        if spins < _SPINS_BEFORE_YIELD:
            _relax(control)
        else:
            _sched_yield()


@functools.cache
def _lead_function() -> CompiledFunction:
    def lead(control: int, function: int, args: int, word: int) -> None:
        _lead(control, function, args, word)

    return CompiledFunction("lead", _SIGNATURE, _PROTOTYPE, lambda: lead)


@functools.cache
def _lead_all_function() -> CompiledFunction:
    def lead_all(control: int, address: int, num_jobs: int, number: int) -> None:
        jobs = carray(as_pointer(address), (num_jobs, 3), np.int64)
        for index in range(num_jobs):
            function, args, num_parts = jobs[index, 0], jobs[index, 1], jobs[index, 2]
            if num_parts == 1 or control == 0:
                for part in range(num_parts):
                    call_kernel(function, args, part, num_parts, 0)
            else:
                number = (number + 1) & _LAST_JOB
                _lead(control, function, args, number << 32 | num_parts << 16)

    return CompiledFunction("lead_all", _SIGNATURE, _PROTOTYPE, lambda: lead_all)


@functools.cache
def beside_kernel(num_jobs: int, num_args: int) -> Kernel:
    """Jobs of several kernels as one, so that no thread waits between them. It may be recorded.

    Its arguments are for each job: address of the kernel, parts, and the kernel's own ``num_args`` arguments.
    It has as many parts as all jobs together.
    """
    each = 2 + num_args

    def beside(address: int, part: int, num_parts: int, thread: int) -> None:
        jobs = carray(as_pointer(address), (num_jobs, each), np.int64)
        for index in range(num_jobs):
            parts = jobs[index, 1]
            if part < parts:
                call_kernel(jobs[index, 0], address + 8 * (index * each + 2), part, parts, thread)
                return
            part -= parts

    return Kernel(f"beside-{num_jobs}-{num_args}", num_jobs * each, lambda: beside)


@functools.cache
def _help_function() -> CompiledFunction:
    def help_(control: int, thread: int) -> None:
        while not _is_closed(control):
            _take_parts(control, thread)
            seen = _load_word(control) >> 32
            spins = 0
            while _load_word(control) >> 32 == seen and spins < _SPINS:
                spins += 1
                _relax(control)
            if spins == _SPINS:
                helper = control + thread * _HELPER_SIZE
                _store_asleep(helper, 1)
                # A job that started before this store was visible has not woken this thread.
                if _load_word(control) >> 32 == seen and not _is_closed(control):
                    _sem_wait(helper + _SEMAPHORE)
                _store_asleep(helper, 0)
                # Several jobs may have begun while this thread woke up.
                while _sem_trywait(helper + _SEMAPHORE) == 0:
                    pass

    signature, prototype = types.void(types.int64, types.int64), ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)
    return CompiledFunction("help", signature, prototype, lambda: help_)


@intrinsic
def as_pointer(context: Any, address: Any) -> Any:
    """Converts an address to the pointer that ``carray`` takes; for kernels."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), code
