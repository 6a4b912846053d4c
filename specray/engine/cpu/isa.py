"""By which instructions this machine multiplies bfloat16 weights."""

from __future__ import annotations

from enum import StrEnum

import llvmlite.binding

from specray.engine.cpu.gemm import tiles


class Way(StrEnum):
    """How rows are multiplied with weights."""

    TILES = "amx"
    PAIRS = "avx512-bf16"
    """By bfloat16 products, two in one."""
    FLOATS = "avx512-fma"
    """By float32 products, of weights that are made float32 on the way."""
    SHORT_FLOATS = "avx2-fma"
    """The same with fewer and shorter registers."""

    @property
    def has_float_rows(self) -> bool:
        """Rows are made float32, too."""
        return self in (Way.FLOATS, Way.SHORT_FLOATS)


def usable_ways() -> tuple[Way, ...]:
    """What the processor and the system allow."""
    features = llvmlite.binding.get_host_cpu_features()
    allowed = {
        Way.TILES: tiles.is_usable(),
        Way.PAIRS: features.get("avx512bf16", False),
        Way.FLOATS: features.get("avx512f", False),
        Way.SHORT_FLOATS: features.get("avx2", False) and features.get("fma", False),
    }
    return tuple(way for way, is_allowed in allowed.items() if is_allowed)


def fastest_way() -> Way | None:
    """What this process multiplies with; None: nothing of ours.

    It depends on the processor alone, not on a measurement: results differ in their last bits.
    """
    usable = usable_ways()
    has_slow_pairs = not llvmlite.binding.get_host_cpu_name().startswith("znver")
    wide = (Way.FLOATS, Way.PAIRS) if has_slow_pairs else (Way.PAIRS, Way.FLOATS)
    return next((way for way in (Way.TILES, *wide, Way.SHORT_FLOATS) if way in usable), None)
