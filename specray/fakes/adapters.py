"""A fake target that loads adapters: its tokens depend on the adapter of their sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specray.adapter_folders import is_adapter_name
from specray.adapter_slots import AdapterSlots, LoadedAdapter
from specray.engine_info import EngineInfo
from specray.errors import ConfigError, ProtocolError
from specray.fakes.engines import FakeTarget
from specray.fakes.models import ToyModel
from specray.types import ADAPTER, ItemFailed, SamplingParams, TargetReplies, TargetReply, VerifyItem


def adapted(model: ToyModel, digest: bytes) -> ToyModel:
    """The model under an adapter; the same model for the base."""
    return replace(model, salt=model.salt + int.from_bytes(digest[:4], "big")) if digest else model


@dataclass(frozen=True, slots=True)
class FakeLoading:
    """interfaces.AdapterLoading of a fake target, which has nothing to read."""

    target: FakeAdapterTarget
    folder: str
    digest: bytes

    def read(self) -> None:
        """Nothing."""

    def place(self) -> bytes:
        return self.target.place(self.folder, self.digest)


class FakeAdapterTarget(FakeTarget):
    """interfaces.SyncAdapterEngine over a toy model.

    Args:
        folders: digest of what lies in each folder; a test changes it as users change files.
        max_adapters: most adapters in memory.
        max_per_step: most different ones in a step; a step beyond raises ProtocolError.
    """

    def __init__(
        self,
        model: ToyModel | None = None,
        *,
        folders: dict[str, bytes],
        max_adapters: int = 4,
        max_per_step: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.folders = folders
        self.slots = AdapterSlots(max_adapters)
        self.num_loads = 0
        self._max_adapters = max_adapters
        self._max_per_step = max_per_step
        self._used: dict[str, bytes] = {}
        """Adapter of each sequence that has one."""

    @property
    def info(self) -> EngineInfo:
        loaded = self.slots.loaded
        return replace(
            self._info,
            adapters=tuple(each.digest for each in loaded),
            adapter_names=tuple(each.folder for each in loaded),
            max_adapters=self._max_adapters,
            max_adapter_rank=16,
        )

    def start_loading(self, folder: str, digest: bytes = b"") -> FakeLoading:
        return FakeLoading(self, folder, digest)

    def place(self, folder: str, digest: bytes) -> bytes:
        """Loads an adapter. Raises as ``interfaces.AdapterLoading.place``."""
        if digest and self.slots.keep(digest):
            return digest
        if not is_adapter_name(folder) or folder not in self.folders:
            raise ConfigError(f"adapter folder {folder!r} is not in the directory of adapters")
        found = self.folders[folder]
        if digest not in (b"", found):
            raise ConfigError(f"adapter folder {folder!r} has other bytes now")
        if not self.slots.keep(found):
            self.slots.add(LoadedAdapter(found, folder, self.slots.free_slot()))
            self.num_loads += 1
        return found

    def unload_adapter(self, digest: bytes) -> None:
        self.slots.unload(digest)

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        replies = super().verify(items)
        used = {self._used.get(item.request_id, b"") for item in items} - {b""}
        if len(used) > self._max_per_step:
            raise ProtocolError(f"a step with {len(used)} adapters; allowed: {self._max_per_step}")
        return replies

    def release(self, request_ids: Sequence[str]) -> None:
        super().release(request_ids)
        for request_id in request_ids:
            if (digest := self._used.pop(request_id, None)) is not None:
                self.slots.end_use(digest)

    def _answer(self, item: VerifyItem, cached: int, *, is_limited: bool) -> TargetReply:
        if item.base_len == 0 and item.sampling is not None and item.request_id not in self._used:
            digest = item.sampling.adapter
            if digest and digest not in self.slots:
                message = "the adapter is not loaded"
                return ItemFailed(
                    item.request_id, item.round_id, 0, message, is_retriable=True, field=ADAPTER
                )
            if digest:
                self.slots.use(digest)
                self._used[item.request_id] = digest
        return super()._answer(item, cached, is_limited=is_limited)

    def _model_of(self, sampling: SamplingParams) -> ToyModel:
        return adapted(self.model, sampling.adapter)
