"""Finds the listening sockets of a process and of all its descendants."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Listener:
    """One TCP socket that accepts connections."""

    process: str
    """Name of the process in the kernel: its first 15 characters."""
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """True if nobody reaches it from another machine."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def descendants(root: int) -> list[int]:
    """Returns the process and all its descendants."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def listeners(root: int) -> set[Listener]:
    """Returns the TCP sockets on which the process and its descendants listen."""
    owners = {inode: process for process in descendants(root) for inode in _sockets(process)}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            state, inode = words[3], words[9]
            if state == "0A" and inode in owners:
                address, port = words[1].split(":")
                process = Path(f"/proc/{owners[inode]}/comm").read_text().strip()
                found.add(Listener(process, _decode(address), int(port, 16)))
    return found


def _sockets(process: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(link.readlink()).removeprefix("socket:[").removesuffix("]")


def _decode(text: str) -> str:
    """Decodes an address, which the kernel writes as 32-bit words in the machine's byte order."""
    words = bytes.fromhex(text)
    return str(ipaddress.ip_address(b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))))
