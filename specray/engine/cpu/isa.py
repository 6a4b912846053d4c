"""Chooses the instruction set by which this machine multiplies bfloat16 weights."""

from __future__ import annotations

from enum import StrEnum

import llvmlite.binding

from specray.engine.cpu.gemm import tiles


class Isa(StrEnum):
    """Instruction sets that have a matrix product here; values are the names in logs and kernel files."""

    AMX = "amx"
    AVX512_BF16 = "avx512-bf16"
    """bfloat16 dot products, two multiplications per lane."""
    AVX512_FMA = "avx512-fma"
    """float32 products; weights are converted to float32 in registers."""
    AVX2_FMA = "avx2-fma"
    """The same with 16 registers of 256 bits."""

    @property
    def has_float_rows(self) -> bool:
        """Whether rows are converted to float32 before the product."""
        return self in (Isa.AVX512_FMA, Isa.AVX2_FMA)


def usable_isas() -> tuple[Isa, ...]:
    """Instruction sets that the processor has and the system allows."""
    features = llvmlite.binding.get_host_cpu_features()
    allowed = {
        Isa.AMX: tiles.is_usable(),
        Isa.AVX512_BF16: features.get("avx512bf16", False),
        Isa.AVX512_FMA: features.get("avx512f", False),
        Isa.AVX2_FMA: features.get("avx2", False) and features.get("fma", False),
    }
    return tuple(isa for isa, is_allowed in allowed.items() if is_allowed)


def fastest_isa() -> Isa | None:
    """The instruction set that this process uses; None: no kernel of ours runs here.

    Chosen by processor, not by measurement: results of different sets differ in their last bits.
    """
    usable = usable_isas()
    has_slow_pairs = not llvmlite.binding.get_host_cpu_name().startswith("znver")
    wide = (Isa.AVX512_FMA, Isa.AVX512_BF16) if has_slow_pairs else (Isa.AVX512_BF16, Isa.AVX512_FMA)
    return next((isa for isa in (Isa.AMX, *wide, Isa.AVX2_FMA) if isa in usable), None)
