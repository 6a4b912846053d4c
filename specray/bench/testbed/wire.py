"""A cable between two network namespaces that can be slow and lose frames, where the kernel has no netem.

A process with one TAP device in either namespace: what the kernel sends into one comes out of the other, late
or not at all. To everything above it is a real cable: TCP sees the loss and retransmits. Run as ``python -m
specray.bench.testbed.wire``; lines of JSON on its standard input change it, and it ends when that is closed,
as when its parent dies.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import sys
import time
from dataclasses import dataclass

from specray.bench.testbed.netns import entered

_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000


@dataclass(frozen=True, slots=True)
class Impairment:
    """Effect of a cable on every frame, each way."""

    delay_ms: float = 0.0
    loss: float = 0.0
    """Probability that a frame is lost."""


class Cable:
    """Schedule of the frames; no I/O and no clock of its own.

    Args:
        seed: seed of the losses.
    """

    def __init__(self, seed: int = 0) -> None:
        self.impairment = Impairment()
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._num_frames = 0

    def send(self, end: int, frame: bytes, now_s: float) -> None:
        """Takes a frame that came in at one end (0 or 1)."""
        if self._random.random() < self.impairment.loss:
            return
        self._num_frames += 1
        due_s = now_s + self.impairment.delay_ms / 1e3
        heapq.heappush(self._waiting, (due_s, self._num_frames, 1 - end, frame))

    def due(self, now_s: float) -> list[tuple[int, bytes]]:
        """Returns what leaves now: the end where it comes out, and the frame; oldest first."""
        frames = []
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, end, frame = heapq.heappop(self._waiting)
            frames.append((end, frame))
        return frames

    def next_due_s(self) -> float | None:
        """Returns the time in seconds when the next frame leaves; None: none waits."""
        return self._waiting[0][0] if self._waiting else None


def open_tap(namespace: str, device: str) -> int:
    """Opens a new TAP device in a namespace; it lives as long as the returned descriptor. Raises OSError."""
    with entered(namespace):
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        try:
            fcntl.ioctl(
                descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI)
            )
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def run(descriptors: tuple[int, int], *, seed: int) -> None:
    """Passes frames on until standard input is closed."""
    cable = Cable(seed)
    control = sys.stdin.fileno()
    with selectors.DefaultSelector() as selector:
        for end, descriptor in enumerate(descriptors):
            selector.register(descriptor, selectors.EVENT_READ, end)
        selector.register(control, selectors.EVENT_READ, None)
        while True:
            due_s = cable.next_due_s()
            timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
            for key, _ in selector.select(timeout_s):
                if key.data is not None:
                    _read(cable, descriptors[key.data], key.data)
                elif line := sys.stdin.readline():
                    cable.impairment = Impairment(**json.loads(line))
                    print("changed", flush=True)
                else:
                    return
            for end, frame in cable.due(time.monotonic()):
                _write(descriptors[end], frame)


def _read(cable: Cable, descriptor: int, end: int) -> None:
    # A device that is down, or has nothing more, is no error: the next event tells.
    try:
        cable.send(end, os.read(descriptor, 1 << 16), time.monotonic())
    except OSError:
        return


def _write(descriptor: int, frame: bytes) -> None:
    # A device that is down or full loses the frame, as a cable does.
    try:
        os.write(descriptor, frame)
    except OSError:
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ends", nargs=2, help="namespace/device")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    first, second = (end.split("/") for end in arguments.ends)
    descriptors = (open_tap(first[0], first[1]), open_tap(second[0], second[1]))
    print("ready", flush=True)
    run(descriptors, seed=arguments.seed)


if __name__ == "__main__":
    main()
