"""Which instructions a processor multiplies with."""

from __future__ import annotations

import llvmlite.binding
import pytest

pytest.importorskip("numba")
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.isa import Way, fastest_way, usable_ways


@pytest.mark.parametrize(
    ("name", "features", "has_tiles", "usable", "fastest"),
    [
        ("nehalem", (), False, (), None),
        ("ivybridge", ("avx",), False, (), None),
        ("haswell", ("avx2", "fma"), False, (Way.SHORT_FLOATS,), Way.SHORT_FLOATS),
        ("znver3", ("avx2", "fma"), False, (Way.SHORT_FLOATS,), Way.SHORT_FLOATS),
        ("skylake-avx512", ("avx512f", "avx2", "fma"), False, (Way.FLOATS, Way.SHORT_FLOATS), Way.FLOATS),
        ("emeraldrapids", ("avx512f", "avx512bf16"), False, (Way.PAIRS, Way.FLOATS), Way.FLOATS),
        ("emeraldrapids", ("avx512f", "avx512bf16", "avx2", "fma"), True, tuple(Way), Way.TILES),
        ("znver4", ("avx512f", "avx512bf16"), False, (Way.PAIRS, Way.FLOATS), Way.PAIRS),
        ("znver5", ("avx512f", "avx512bf16"), False, (Way.PAIRS, Way.FLOATS), Way.PAIRS),
    ],
)
def test_bfloat16_products_are_used_where_they_are_fast(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    features: tuple[str, ...],
    has_tiles: bool,
    usable: tuple[Way, ...],
    fastest: Way | None,
) -> None:
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_name", lambda: name)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: dict.fromkeys(features, True))
    monkeypatch.setattr(tiles, "is_usable", lambda: has_tiles)
    assert usable_ways() == usable
    assert fastest_way() is fastest
