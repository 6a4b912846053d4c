"""The instruction set chosen for each processor."""

from __future__ import annotations

import llvmlite.binding
import pytest

pytest.importorskip("numba")
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.isa import Isa, fastest_isa, usable_isas


@pytest.mark.parametrize(
    ("name", "features", "has_tiles", "usable", "fastest"),
    [
        ("nehalem", (), False, (), None),
        ("ivybridge", ("avx",), False, (), None),
        ("haswell", ("avx2", "fma"), False, (Isa.AVX2_FMA,), Isa.AVX2_FMA),
        ("znver3", ("avx2", "fma"), False, (Isa.AVX2_FMA,), Isa.AVX2_FMA),
        ("skylake-avx512", ("avx512f", "avx2", "fma"), False, (Isa.AVX512_FMA, Isa.AVX2_FMA), Isa.AVX512_FMA),
        (
            "emeraldrapids",
            ("avx512f", "avx512bf16"),
            False,
            (Isa.AVX512_BF16, Isa.AVX512_FMA),
            Isa.AVX512_FMA,
        ),
        ("emeraldrapids", ("avx512f", "avx512bf16", "avx2", "fma"), True, tuple(Isa), Isa.AMX),
        ("znver4", ("avx512f", "avx512bf16"), False, (Isa.AVX512_BF16, Isa.AVX512_FMA), Isa.AVX512_BF16),
        ("znver5", ("avx512f", "avx512bf16"), False, (Isa.AVX512_BF16, Isa.AVX512_FMA), Isa.AVX512_BF16),
    ],
)
def test_bfloat16_products_are_used_where_they_are_fast(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    features: tuple[str, ...],
    has_tiles: bool,
    usable: tuple[Isa, ...],
    fastest: Isa | None,
) -> None:
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_name", lambda: name)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: dict.fromkeys(features, True))
    monkeypatch.setattr(tiles, "is_usable", lambda: has_tiles)
    assert usable_isas() == usable
    assert fastest_isa() is fastest
