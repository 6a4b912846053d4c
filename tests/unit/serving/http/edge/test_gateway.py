"""Headers of an inference gateway count where it is trusted, after what the body says."""

from __future__ import annotations

from typing import Any

import pytest

from specray.config import parse_config
from specray.errors import InvalidRequestError
from specray.serving.http.edge.gateway import with_gateway
from tests.unit.serving.http.service import REPLY, TEXT, say, serving

OBJECTIVES = {"urgent": -5}
HEADERS = {
    "x-gateway-inference-fairness-id": "team",
    "x-gateway-inference-objective": "urgent",
    "x-slo-ttft-ms": "200",
    "x-slo-tpot-ms": "50.5",
}
SAID = {"speculation": {"tenant": "team"}, "priority": -5, "slo": {"ttft_ms": 200.0, "itl_ms": 50.5}}


@pytest.mark.parametrize(
    ("body", "headers", "result"),
    [
        ({}, {}, {}),
        ({}, HEADERS, SAID),
        ({"priority": 1}, HEADERS, {**SAID, "priority": 1}),
        ({"speculation": {"tenant": "own"}}, HEADERS, {**SAID, "speculation": {"tenant": "own"}}),
        ({"slo": {"itl_ms": 9}}, HEADERS, {**SAID, "slo": {"ttft_ms": 200.0, "itl_ms": 9}}),
        ({"slo": None}, HEADERS, SAID),
        ({"slo": "x"}, HEADERS, {**SAID, "slo": "x"}),
        ({}, {"x-llm-d-inference-fairness-id": "b"}, {"speculation": {"tenant": "b"}}),
        ({}, {"x-gateway-inference-objective": "other"}, {}),
        ([1], HEADERS, [1]),
    ],
)
def test_the_bodys_values_go_before_the_gateways(body: Any, headers: dict[str, str], result: Any) -> None:
    assert with_gateway(body, headers, OBJECTIVES) == result


@pytest.mark.parametrize("text", ["soon", "nan", "inf"])
def test_a_time_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="x-slo-tpot-ms") as caught:
        with_gateway({}, {"x-slo-tpot-ms": text}, OBJECTIVES)
    assert caught.value.field == "x-slo-tpot-ms"


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_only_a_trusted_gateway_is_heard(is_trusted: bool) -> None:
    router = say(REPLY)
    config = parse_config({"http": {"trust_gateway": is_trusted, "gateway_objectives": OBJECTIVES}})
    async with serving(router, config=config) as service:
        body = {name: value for name, value in TEXT.items() if name != "model"}
        async with service.http.post("/v1/completions", json=body, headers=HEADERS) as response:
            assert response.status == 200, await response.text()
    request = router.requests[0]
    assert (request.tenant, request.priority, request.level is not None) == (
        ("team", -5, True) if is_trusted else ("", 0, False)
    )
