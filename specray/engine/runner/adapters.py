"""The adapters of one rank: reads their files, and runs steps in which rows have some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specray.adapter_folders import ADAPTER_FILES, MAX_FILE_BYTES, adapter_folder
from specray.checkpoint_digest import digest_of_adapter
from specray.engine.inputs import AdapterInput
from specray.engine.model.adapters.parts import Part, Place
from specray.engine.model.adapters.pool import AdapterPool
from specray.engine.model.checkpoint.adapter import adapter_of
from specray.engine.runner.cuda_graphs import GraphedForward
from specray.engine.runner.runner import cpu_graphs_of
from specray.engine.step import Forward
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext

_DIGEST_NUMBERS = 4
_HEADER_BYTES = 1 << 20
"""Bytes of a file of tensors beside their numbers."""


class RunnerAdapters:
    """Implements ``cache.adapters.AdapterRanks``, of the leader; others follow it.

    Every rank reads the files itself, and all must have found the same bytes.

    Args:
        directory: with a folder for each adapter.
        graphs: of the pool's forward, on CUDA.
        device: of the forward.
    """

    def __init__(
        self,
        pool: AdapterPool,
        directory: str,
        parallel: ParallelContext | None,
        *,
        device: torch.device,
        graphs: GraphedForward | None,
    ) -> None:
        self.pool, self.graphs = pool, graphs
        self._directory, self._parallel = directory, parallel
        recorded = cpu_graphs_of(pool.forward, device) if parallel is None else None
        self.forward: Forward = recorded or pool.forward
        self._ready: Mapping[Place, Part] = {}

    @property
    def num_slots(self) -> int:
        return self.pool.num_slots

    @property
    def max_rank(self) -> int:
        return self.pool.max_rank

    def prepare(self, folder: str, digest: bytes) -> bytes:
        """See ``cache.adapters.AdapterRanks``. Raises EngineLostError: a rank is gone."""
        found, self._ready = self._read(folder, digest)
        if self._parallel is not None:
            self._parallel.send_adapter(AdapterInput(folder, found))
            if not self._agree(found):
                self._ready = {}
                raise ConfigError(
                    f"adapter {folder!r} cannot be loaded on all ranks, or has other bytes there; allowed: "
                    "the same files on all nodes"
                )
        return found

    def put(self, slot: int) -> None:
        """See ``cache.adapters.AdapterRanks``."""
        self._do(AdapterInput(slot=slot))

    def clear(self, slot: int) -> None:
        """See ``cache.adapters.AdapterRanks``."""
        self._do(AdapterInput(slot=slot, is_cleared=True))

    def _do(self, work: AdapterInput) -> None:
        if self._parallel is not None:
            self._parallel.send_adapter(work)
        self.follow(work)

    def follow(self, work: AdapterInput) -> None:
        """Does what the leader has its ranks do. Raises EngineLostError: a rank is gone."""
        if work.is_cleared:
            self.pool.clear(work.slot)
        elif work.folder:
            try:
                found, self._ready = self._read(work.folder, work.digest)
            except ConfigError:
                found, self._ready = b"", {}
            self._agree(found)
        else:
            self.pool.put(work.slot, self._ready)
            self._ready = {}

    def _agree(self, digest: bytes) -> bool:
        """Whether all ranks have read an adapter, and the same."""
        assert self._parallel is not None, "a rank alone agrees"
        padded = digest.ljust(8 * _DIGEST_NUMBERS, b"\0")
        own = torch.frombuffer(bytearray(padded), dtype=torch.int64)
        numbers = torch.cat((own, torch.tensor([len(digest)])))
        everyones = self._parallel.exchange(numbers)
        return bool((everyones == everyones[0]).all())

    def _read(self, folder: str, digest: bytes) -> tuple[bytes, Mapping[Place, Part]]:
        """Digest and parts of an adapter. ConfigError: it cannot be loaded, or has other bytes."""
        path, label = adapter_folder(self._directory, folder), f"adapter {folder!r}"
        most = MAX_FILE_BYTES[0], min(MAX_FILE_BYTES[1], 4 * self.pool.max_numbers + _HEADER_BYTES)
        config, tensors = (
            _read_file(path / name, size, label) for name, size in zip(ADAPTER_FILES, most, strict=True)
        )
        found = digest_of_adapter((config, tensors))
        if digest and found != digest:
            raise ConfigError(
                f"{label} has other bytes than it had, of digest {found.hex()[:16]}; allowed: "
                f"{digest.hex()[:16]}"
            )
        return found, self.pool.parts(adapter_of(label, config, tensors, max_rank=self.pool.max_rank))


def _read_file(file: Path, most: int, label: str) -> bytes:
    try:
        with file.open("rb") as stream:
            content = stream.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{label}: {file.name} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise ConfigError(f"{label}: {file.name} has more than {most} bytes; allowed: at most that many")
    return content
