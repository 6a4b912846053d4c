"""Resident memory of a service's processes, if they run on this machine, which needs Linux."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specray.bench.testbed.tree import descendants

_LISTENS = "0A"
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    pid: int
    name: str
    rss_bytes: int


def service_pids(port: int) -> tuple[int, ...]:
    """Returns the processes of the service that listens on ``port``; empty if it is not on this machine.

    With Ray, the listener is a worker of a raylet; the service is the process that started the raylet, if
    that still lives, and all descendants. Without Ray it is the listener and its descendants.
    """
    listener = _listener(port)
    if listener is None:
        return ()
    root = listener
    raylet = _parent(listener)
    if "raylet" in _name(raylet):
        starter = _parent(raylet)
        root = starter if starter > 1 else raylet
    return (root, *descendants(root))


def read_memory(pids: Iterable[int]) -> list[ProcessMemory]:
    """Reads the memory of those processes that still live, the largest first."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    found = []
    for pid in pids:
        try:
            num_pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
        except OSError:
            continue
        if num_pages:
            found.append(ProcessMemory(pid, _name(pid), num_pages * page_bytes))
    return sorted(found, key=lambda each: -each.rss_bytes)


def _listener(port: int) -> int | None:
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for path in _PROC.glob("[0-9]*/fd/*"):
        try:
            if str(path.readlink()) in inodes:
                return int(path.parts[2])
        except OSError:
            # Another user's process, or one that has ended.
            continue
    return None


def _parent(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _name(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    first = words[0].decode("utf-8", "replace").strip()
    if first.startswith("ray::"):
        return first
    rest = [word.decode("utf-8", "replace") for word in words[1:4]]
    program = Path(first).name
    # An interpreter is known by what it runs.
    if re.match(r"python", program) and rest:
        script = next((word for word in rest if word and not word.startswith("-")), "")
        return f"{program} {Path(script).name}".strip()
    return program
