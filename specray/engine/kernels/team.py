"""Runs a kernel on torch's own OpenMP threads, so that no second pool of threads fights over the cores."""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding
import torch  # loads the OpenMP library before it is looked for
from numba import cfunc
from numba.core import types
from numba.extending import intrinsic

_THREAD_NUM = "specray_thread_num"


@cfunc(types.int32())
def _first_thread() -> int:
    return 0


def _openmp() -> Any:
    """torch's OpenMP library; None where it is not GNU's or offers no entry of that name."""
    try:
        library = ctypes.CDLL("libgomp.so.1")
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
        library.omp_get_thread_num.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library


_library = _openmp()
_thread_num_address = (
    _first_thread.address
    if _library is None
    else ctypes.cast(_library.omp_get_thread_num, ctypes.c_void_p).value
)
llvmlite.binding.add_symbol(_THREAD_NUM, _thread_num_address)
thread_num = types.ExternalFunction(_THREAD_NUM, types.int32())
"""For kernels: the number of this thread in its team."""


def num_threads() -> int:
    """Threads of a full team now."""
    return 1 if _library is None else torch.get_num_threads()


class Kernel:
    """A compiled function of one pointer, run by a team of threads.

    Args:
        function: a numba cfunc ``void(void*)``; each thread finds its part by ``thread_num``.
    """

    __slots__ = ("_address", "_call", "_function")

    def __init__(self, function: Any) -> None:
        self._function = function  # owns the code
        self._address = function.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def __call__(self, args_address: int, team_size: int) -> None:
        """Calls the function once in each thread and waits for all.

        Args:
            args_address: what every thread is given.
            team_size: 1, or :func:`num_threads`.
        """
        if team_size == 1:
            self._call(args_address)
        else:
            _library.GOMP_parallel(self._address, args_address, team_size, 0)


@intrinsic
def as_pointer(context: Any, address: Any) -> Any:
    """For kernels: an address as the pointer that ``carray`` wants."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), code
