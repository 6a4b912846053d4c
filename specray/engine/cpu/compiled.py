"""Disk cache of compiled kernels: numba takes seconds to compile what a restarted engine needs at once.

numba's own cache cannot key functions that depend on intrinsics made at run time. Here the key is the
kernel's name, the sources of this package, the compiler's version and the processor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import pickle
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from numba import cfunc
from numba.core.bytecode import FunctionIdentity
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from specray.environment import cache_directory
from specray.errors import ConfigError

_DIGEST_BYTES = 32


class CompiledFunction:
    """Native code of a C function, loaded from the cache or compiled.

    Args:
        name: cache key of the function, next to this package's sources. None: never cached.
        signature: numba signature.
        prototype: the same signature as a ctypes prototype.
        make: returns the Python function to compile; called only on a cache miss.
    """

    __slots__ = ("_library", "address", "call")

    def __init__(self, name: str | None, signature: Any, prototype: Any, make: Callable[[], Any]) -> None:
        self._library, self.address = _load_or_compile(name, signature, make)
        self.call = prototype(self.address)


def _load_or_compile(name: str | None, signature: Any, make: Callable[[], Any]) -> tuple[Any, int]:
    path = None if name is None or not _number_functions_apart() else _cache_path(name)
    if path is not None and (found := _load(path)) is not None:
        return found
    function = cfunc(signature)(make())
    library, symbol = function._library, function._wrapper_name
    if path is not None:
        _write(path, pickle.dumps((symbol, library.serialize_using_object_code())))
    return library, function.address


@functools.cache
def _number_functions_apart() -> bool:
    """Makes symbol names of this process unique. False: this version of numba has no such counter.

    numba numbers functions from 1 in every process. Two kernels compiled by different processes could thus
    have one symbol name, and a third process that loads both would run the first for both.
    """
    if not isinstance(getattr(FunctionIdentity, "_unique_ids", None), itertools.count):
        return False
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))
    return True


def _load(path: Path) -> tuple[Any, int] | None:
    """Reads a cached kernel; None: the file is missing, truncated, unreadable, or others may write it."""
    try:
        if not _is_ours(path.parent.stat()):
            return None
        with path.open("rb") as file:
            if not _is_ours(os.fstat(file.fileno())):
                return None
            stored = file.read()
        digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        symbol, state = pickle.loads(content)
    except (OSError, ValueError, EOFError, pickle.UnpicklingError):
        return None
    # The code may refer to numba's run-time library, which only compiling sets up.
    rtsys.initialize(cpu_target.target_context)
    library = cpu_target.target_context.codegen().unserialize_library(state)
    return library, library.get_pointer_to_function(symbol)


def _is_ours(status: os.stat_result) -> bool:
    """Whether nobody but this user can change a file or directory, whose code will be run."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _write(path: Path, content: bytes) -> None:
    """Writes the file atomically, with its SHA-256 in front. A failure only costs time, so it is ignored."""
    with contextlib.suppress(OSError):
        # Cached code is executed, so nobody else may write here.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(path.parent.stat()):
            return
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            part = Path(file.name)
            try:
                file.write(hashlib.sha256(content).digest() + content)
                file.flush()
                part.replace(path)
            except OSError:
                part.unlink()
                raise


def _cache_path(name: str) -> Path | None:
    """Path of the cached kernel; None: the user has no directory for a cache."""
    try:
        return cache_directory() / "kernels" / _fingerprint() / f"{name}.bin"
    except ConfigError:
        return None


def source_files() -> list[Path]:
    engine = Path(__file__).parent.parent
    others = engine / "sampling" / "gumbel_argmax.py", engine / "weights" / "block_codes.py"
    return [*sorted((engine / "cpu").rglob("*.py")), *others]


@functools.cache
def _fingerprint() -> str:
    """Digest of everything besides a kernel's name that decides its code."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.read_bytes())
    features = llvmlite.binding.get_host_cpu_features().flatten()
    for text in (numba.__version__, llvmlite.__version__, llvmlite.binding.get_host_cpu_name(), features):
        digest.update(text.encode())
    return digest.hexdigest()[:32]
