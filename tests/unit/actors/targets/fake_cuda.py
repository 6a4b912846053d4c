"""A stand-in for CUDA on a machine of some GPUs: what a process sees of them, and which one is whose."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch


class FakeCuda:
    """Takes the place of what the engine asks ``torch.cuda``; shows what is listed when first asked.

    Args:
        num_gpus: GPUs of the machine, named "0", "1" ...
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
        self._all = [str(index) for index in range(num_gpus)]
        self._shown: list[str] | None = None
        self._own = threading.local()
        """Index of the current device of each thread, as CUDA has it."""
        for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
            # Whatever the test sets is taken back.
            monkeypatch.setenv(name, "")
            del os.environ[name]
        for name in ("device_count", "is_available", "is_initialized", "current_device", "set_device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "get_device_properties", self._properties)

    @property
    def shown(self) -> list[str]:
        """Names of what the process sees, which nothing changes after this."""
        if self._shown is None:
            listed = os.environ.get("CUDA_VISIBLE_DEVICES")
            self._shown = self._all if listed is None else [name for name in listed.split(",") if name]
        return self._shown

    @property
    def current(self) -> str:
        """Name of this thread's current device."""
        return self.shown[self.current_device()]

    def device_count(self) -> int:
        return len(self.shown)

    def is_available(self) -> bool:
        return bool(self.shown)

    def is_initialized(self) -> bool:
        return self._shown is not None

    def current_device(self) -> int:
        assert self.shown, "no device"
        return getattr(self._own, "index", 0)

    def set_device(self, device: torch.device) -> None:
        if (device.index or 0) >= len(self.shown):
            raise RuntimeError("CUDA error: invalid device ordinal")
        self._own.index = device.index or 0

    def _properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"uuid-{self.shown[device.index or 0]}")
