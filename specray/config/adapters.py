"""Configuration of adapters that the target loads while it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from specray.adapter_folders import ADAPTER_NAME
from specray.config.section import Section

AdapterName = Annotated[str, Field(pattern=ADAPTER_NAME)]


class AdaptersConfig(Section):
    """LoRA adapters that requests name; their names are those of folders in one directory."""

    directory: str = Field(
        min_length=1, description="Directory with a folder for each adapter; every rank reads it."
    )
    max_loaded: int = Field(8, ge=1, le=256, description="Maximum adapters in memory.")
    max_rank: int = Field(64, ge=1, le=512, description="Maximum rank of an adapter.")
    max_per_step: int = Field(4, ge=1, le=64, description="Maximum different adapters in one step.")
    preload: tuple[AdapterName, ...] = Field((), description="Folders of adapters that are loaded at start.")
    pinned: tuple[AdapterName, ...] = Field(
        (), description="Names of adapters that leave memory only when they are unloaded by name."
    )
    autoload: bool = Field(
        False, description="True: the first request with a folder's name loads the adapter in it."
    )

    @field_validator("directory")
    @classmethod
    def _absolute(cls, path: str) -> str:
        """``~`` and relative paths, which other processes would not find as they are."""
        return str(Path(path).expanduser().absolute())

    @model_validator(mode="after")
    def _check_counts(self) -> AdaptersConfig:
        if self.max_per_step > self.max_loaded:
            raise ValueError(
                f"max_per_step is {self.max_per_step} with max_loaded {self.max_loaded}; allowed: at most "
                "max_loaded"
            )
        if (num_kept := len({*self.preload, *self.pinned})) > self.max_loaded:
            raise ValueError(
                f"preload and pinned name {num_kept} adapters with max_loaded {self.max_loaded}; allowed: at "
                "most that many"
            )
        return self
