"""A ring of messages in shared memory, from one process to others on the same node.

The writer publishes a message by counting it; each reader counts what it has read, and the writer waits where
a reader is a whole ring behind. Nobody calls the system while messages come quickly: a reader looks, and
sleeps the longer the longer there is nothing. That a reader has ended shows only when the ring is full, and
that the writer has only by its silence: whoever started the processes watches them.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NUM_SLOTS = 64
SLOT_LEN = 1024
"""Integers of one slot; a longer message takes several."""
_LINE = 8
"""Integers of a cache line; each count has its own."""
_SLOT_HEADER_LEN = 2
LOOKS_S = 0.02
"""Seconds for which a process looks again and again before it begins to sleep."""
_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3
_DIRECTORY = Path("/dev/shm")


class StepRing:
    """One process's view of the ring.

    Args:
        memory: of the ring.
        num_readers: readers besides the writer.
        reader: which of the readers this process is; None: the writer.
    """

    def __init__(self, memory: mmap.mmap, num_readers: int, reader: int | None = None) -> None:
        self._memory = memory
        self._numbers: NDArray[np.int64] = np.frombuffer(memory, np.int64)
        self._reader = reader
        first_slot = (1 + num_readers) * _LINE + _LINE
        self._counts = self._numbers[_LINE:first_slot:_LINE]  # written, then read by each reader
        self._slots = self._numbers[first_slot:].reshape(NUM_SLOTS, SLOT_LEN)
        self._fence = threading.Lock()
        self._count = 0

    @classmethod
    def create(cls, num_readers: int) -> tuple[StepRing, str, int]:
        """Makes a ring for the writer.

        Returns:
            The ring, the path under which readers find it until it is unlinked, and its token.

        Raises:
            OSError: there is no shared memory, or too little.
        """
        directory = _DIRECTORY if _DIRECTORY.is_dir() else None
        handle, path = tempfile.mkstemp(prefix="specray-steps-", dir=directory)
        try:
            num_bytes = 8 * ((2 + num_readers) * _LINE + NUM_SLOTS * SLOT_LEN)
            os.posix_fallocate(handle, 0, num_bytes)
            ring = cls(mmap.mmap(handle, num_bytes), num_readers)
        except BaseException:
            Path(path).unlink()
            raise
        finally:
            os.close(handle)
        token = secrets.randbits(62)
        ring._numbers[0] = token
        return ring, path, token

    @classmethod
    def attach(cls, path: str, token: int, num_readers: int, reader: int) -> StepRing:
        """The ring of another process. Raises OSError if it is not on this node."""
        handle = os.open(path, os.O_RDWR)
        try:
            ring = cls(mmap.mmap(handle, os.fstat(handle).st_size), num_readers, reader)
        except ValueError as error:
            raise OSError(f"{path} is no ring: {error}") from None
        finally:
            os.close(handle)
        if ring._numbers[0] != token:
            raise OSError(f"{path} is the ring of others")
        return ring

    def write(self, message: Sequence[int], timeout_s: float) -> None:
        """Publishes a message. Raises TimeoutError when a reader is a whole ring behind for so long."""
        numbers = np.array(message, np.int64)
        room = SLOT_LEN - _SLOT_HEADER_LEN
        for start in range(0, max(1, len(numbers)), room):
            part = numbers[start : start + room]
            _wait(lambda: self._count - int(self._counts[1:].min()) < NUM_SLOTS, timeout_s)
            slot = self._slots[self._count % NUM_SLOTS]
            slot[: _SLOT_HEADER_LEN + len(part)] = (len(part), start + room >= len(numbers), *part)
            self._publish(0)

    def read(self, timeout_s: float) -> list[int]:
        """The next message. Raises TimeoutError when there is none for so long."""
        assert self._reader is not None, "the writer receives nothing"
        message: list[int] = []
        while True:
            _wait(lambda: int(self._counts[0]) > self._count, timeout_s)
            slot = self._slots[self._count % NUM_SLOTS]
            self._order()
            size, is_last = slot[:_SLOT_HEADER_LEN].tolist()
            message += slot[_SLOT_HEADER_LEN : _SLOT_HEADER_LEN + size].tolist()
            self._publish(1 + self._reader)
            if is_last:
                return message

    def _publish(self, place: int) -> None:
        # Whoever sees the count must see what was written before it, or that it was read.
        self._count += 1
        self._order()
        self._counts[place] = self._count

    def _order(self) -> None:
        """Keeps memory accesses before it before those after it, on processors that reorder them, too.

        What is released once and taken again is a barrier both ways; one lock alone is one way only.
        """
        for _ in range(2):
            with self._fence:
                pass


def _wait(is_ready: Callable[[], bool], timeout_s: float) -> None:
    began = time.monotonic()
    pause = _SHORTEST_SLEEP_S
    while not is_ready():
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise TimeoutError(f"nothing came for {timeout_s:g} s")
        if waited < LOOKS_S:
            time.sleep(0)
        else:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP_S)
