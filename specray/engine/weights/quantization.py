"""Formats of weights; importing it needs neither torch nor a model."""

from __future__ import annotations

from enum import StrEnum

GROUP = 32
"""Input features of a group of codes, which share a scale."""
NVFP4_GROUP = 16
"""Input features of NVFP4 that share a scale."""


class Quantization(StrEnum):
    """Formats of weights; values are those of the setting."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits_per_weight(self) -> float:
        """Bits of a quantised weight, with its share of the group's float16 numbers."""
        assert self is not Quantization.NONE, "depends on the data type"
        return 8 + 16 / GROUP if self is Quantization.INT8 else 4 + 32 / GROUP
