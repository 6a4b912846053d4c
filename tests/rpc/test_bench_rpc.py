"""``bench rpc``: a worker process starts, answers and ends."""

from __future__ import annotations

import pytest

from specray.bench.rpc import measure_rpc


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_measure_rpc_reports_ordered_percentiles(transport: str) -> None:
    result = measure_rpc(transport=transport, num_sessions=2, num_rounds=20)  # type: ignore[arg-type]
    assert (result.transport, result.num_sessions, result.num_rounds) == (transport, 2, 20)
    assert 0 < result.p50_ms <= result.p95_ms <= result.p99_ms
