"""The adapters of one rank: reads their files, and runs steps in which rows have some."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from specray.adapter_folders import ADAPTER_FILES, MAX_FILE_BYTES, adapter_folder
from specray.checkpoint_digest import digest_of_adapter
from specray.config import DraftConfig, EngineConfig, TargetConfig
from specray.engine.cache.adapters import AdapterReading
from specray.engine.inputs import AdapterInput
from specray.engine.model.adapters.layers import Packed
from specray.engine.model.adapters.parts import Place
from specray.engine.model.adapters.pool import AdapterPool
from specray.engine.model.checkpoint.adapter import adapter_of, read_adapter
from specray.engine.runner.cuda_graphs import GraphedForward
from specray.engine.runner.runner import cpu_graphs_of
from specray.engine.step import Forward
from specray.errors import ConfigError
from specray.tokenization.files import stored_chat_template

if TYPE_CHECKING:
    from specray.engine.group.parallel import ParallelContext

_DIGEST_NUMBERS = 4
_HEADER_BYTES = 1 << 20
"""Bytes of a file of tensors beside their numbers."""


class AdapterPlan(NamedTuple):
    """The adapters that an engine may have."""

    num_slots: int
    max_rank: int
    find: Callable[[str], Path]
    """The folder of an adapter by its name. Raises ConfigError: there is none, or none that is read."""


def plan_adapters(config: EngineConfig) -> AdapterPlan | None:
    """Plans those of a target, or the draft's own; None: it has none. Raises ConfigError for bad files."""
    if isinstance(config, TargetConfig) and config.adapters is not None:
        own = config.adapters
        return AdapterPlan(own.max_loaded, own.max_rank, partial(adapter_folder, own.directory))
    if isinstance(config, DraftConfig) and config.adapters:
        folders = {name: Path(path) for name, path in config.adapters.items()}
        ranks = (
            layer.rank
            for name, path in folders.items()
            for layer in read_adapter(str(path), setting=f"draft.adapters.{name}").layers.values()
        )
        return AdapterPlan(len(folders), max(ranks), folders.__getitem__)
    return None


class Reading:
    """Implements ``cache.adapters.AdapterReading``: an adapter that is read, checked and packed.

    Args:
        read: returns digest and parts; or raises ConfigError.
    """

    def __init__(self, read: Callable[[], tuple[bytes, Mapping[Place, Packed]]]) -> None:
        self._read = read
        self._digest = b""
        self._error: ConfigError | None = None
        self.parts: Mapping[Place, Packed] = {}

    def read(self) -> None:
        try:
            self._digest, self.parts = self._read()
        except ConfigError as error:
            self._error = error

    @property
    def digest(self) -> bytes:
        if self._error is not None:
            raise self._error
        return self._digest

    @property
    def digest_or_none(self) -> bytes:
        """Empty where it cannot be loaded."""
        return b"" if self._error is not None else self._digest


class RunnerAdapters:
    """Implements ``cache.adapters.AdapterRanks``, of the leader; others follow it.

    Every rank reads the files itself, while steps go on, and all must have found the same bytes.

    Args:
        find: as ``AdapterPlan.find``.
        model: directory of the model, whose chat template requests with adapters have; None: it is not used.
        graphs: of the pool's forward, on CUDA.
        device: of the forward.
    """

    def __init__(
        self,
        pool: AdapterPool,
        find: Callable[[str], Path],
        parallel: ParallelContext | None,
        *,
        model: Path | None,
        device: torch.device,
        graphs: GraphedForward | None,
    ) -> None:
        self.pool, self.graphs, self._model = pool, graphs, model
        self._find, self._parallel = find, parallel
        recorded = cpu_graphs_of(pool.forward, device) if parallel is None else None
        self.forward: Forward = recorded or pool.forward
        self._followed: tuple[Reading, threading.Thread] | None = None
        """What the leader had this rank read last."""

    @property
    def num_slots(self) -> int:
        return self.pool.num_slots

    @property
    def max_rank(self) -> int:
        return self.pool.max_rank

    def start(self, folder: str, digest: bytes) -> Reading:
        """See ``cache.adapters.AdapterRanks``. Raises EngineLostError: a rank is gone."""
        if self._parallel is not None:
            self._parallel.send_adapter(AdapterInput(folder, digest))
        return Reading(partial(self._read, folder, digest))

    def put(self, slot: int, reading: AdapterReading) -> None:
        """See ``cache.adapters.AdapterRanks``. Raises EngineLostError: a rank is gone."""
        assert isinstance(reading, Reading)
        found = reading.digest
        if self._parallel is not None:
            self._parallel.send_adapter(AdapterInput(slot=slot))
            if not self._agree(found):
                raise ConfigError(
                    "the adapter cannot be loaded on all ranks, or has other bytes there; allowed: the same "
                    "files on all nodes"
                )
        self.pool.put(slot, reading.parts)

    def clear(self, slot: int) -> None:
        """See ``cache.adapters.AdapterRanks``."""
        if self._parallel is not None:
            self._parallel.send_adapter(AdapterInput(slot=slot, is_cleared=True))
        self.pool.clear(slot)

    def follow(self, work: AdapterInput) -> None:
        """Does what the leader has its ranks do. Raises EngineLostError: a rank is gone."""
        if work.is_cleared:
            self.pool.clear(work.slot)
        elif work.folder:
            reading = Reading(partial(self._read, work.folder, work.digest))
            thread = threading.Thread(target=reading.read, name="adapter", daemon=True)
            thread.start()
            self._followed = reading, thread
        else:
            assert self._followed is not None, "it is read before it has a slot"
            (reading, thread), self._followed = self._followed, None
            thread.join()
            if self._agree(reading.digest_or_none):
                self.pool.put(work.slot, reading.parts)

    def _agree(self, digest: bytes) -> bool:
        """Whether all ranks have read an adapter, and the same."""
        assert self._parallel is not None, "a rank alone agrees"
        padded = digest.ljust(8 * _DIGEST_NUMBERS, b"\0")
        own = torch.frombuffer(bytearray(padded), dtype=torch.int64)
        numbers = torch.cat((own, torch.tensor([len(digest)])))
        everyones = self._parallel.exchange(numbers)
        return bool((everyones == everyones[0]).all())

    def _read(self, folder: str, digest: bytes) -> tuple[bytes, Mapping[Place, Packed]]:
        """Digest and parts of an adapter. ConfigError: it cannot be loaded, or has other bytes."""
        path, label = self._find(folder), f"adapter {folder!r}"
        template = None if self._model is None else stored_chat_template(path)
        if template and template != stored_chat_template(self._model or path):
            raise ConfigError(
                f"{label} has a chat template of its own, which would not be used; allowed: the model's, "
                "or none"
            )
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
        return found, self.pool.packed(adapter_of(label, config, tensors, max_rank=self.pool.max_rank))


def _read_file(file: Path, most: int, label: str) -> bytes:
    try:
        with file.open("rb") as stream:
            content = stream.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{label}: {file.name} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise ConfigError(f"{label}: {file.name} has more than {most} bytes; allowed: at most that many")
    return content
