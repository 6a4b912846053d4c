"""Compiled kernels, kept on disk: numba takes seconds for what a restarted engine needs at once.

numba's own cache cannot know functions that depend on intrinsics made at run time. Here a kernel is known by
its name, the sources of this package, the compiler's version and the processor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from numba import cfunc
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

_CACHE_DIRECTORY = Path("~/.cache/specray/kernels")


class CompiledFunction:
    """Native code of a C function.

    Args:
        name: of the function; together with the sources it says what the code does.
        signature: numba's.
        prototype: ctypes' of the same signature.
        make: gives the Python function to compile; called only when it is not in the cache.
    """

    __slots__ = ("_library", "address", "call")

    def __init__(self, name: str, signature: Any, prototype: Any, make: Callable[[], Any]) -> None:
        self._library, self.address = _load_or_compile(name, signature, make)
        self.call = prototype(self.address)


def _load_or_compile(name: str, signature: Any, make: Callable[[], Any]) -> tuple[Any, int]:
    """The library, which owns the code, and the function's address."""
    path = _cache_path(name)
    with contextlib.suppress(OSError, ValueError, EOFError, pickle.UnpicklingError):
        digest, content = path.read_bytes()[:32], path.read_bytes()[32:]
        if hashlib.sha256(content).digest() == digest:
            symbol, state = pickle.loads(content)
            # The code may refer to numba's run-time library, which compiling would have set up.
            rtsys.initialize(cpu_target.target_context)
            library = cpu_target.target_context.codegen().unserialize_library(state)
            return library, library.get_pointer_to_function(symbol)
    function = cfunc(signature)(make())
    library, symbol = function._library, function._wrapper_name
    with contextlib.suppress(OSError):
        _write(path, pickle.dumps((symbol, library.serialize_using_object_code())))
    return library, function.address


def _write(path: Path, content: bytes) -> None:
    """All at once, so that nobody reads a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(hashlib.sha256(content).digest() + content)
    Path(file.name).replace(path)


def _cache_path(name: str) -> Path:
    return _CACHE_DIRECTORY.expanduser() / _fingerprint() / f"{name}.bin"


@functools.cache
def _fingerprint() -> str:
    """Of everything besides a kernel's name that decides its code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    features = llvmlite.binding.get_host_cpu_features().flatten()
    for text in (numba.__version__, llvmlite.__version__, llvmlite.binding.get_host_cpu_name(), features):
        digest.update(text.encode())
    return digest.hexdigest()[:32]
