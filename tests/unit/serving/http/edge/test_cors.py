"""Web pages of other origins: preflights, answers and errors, and nothing without the option."""

from __future__ import annotations

import pytest

from specray.config import Config, parse_config
from specray.errors import OverloadedError
from specray.fakes import FakeRouterClient
from specray.serving.admission.api_keys import key_hash
from tests.unit.serving.http.service import INFO, MODEL, TEXT, serving

PAGE = "http://localhost:5173"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ALLOW = "Access-Control-Allow-Origin"


def config(*origins: str, **sections: object) -> Config:
    return parse_config({"served_model_name": MODEL, "http": {"cors_origins": origins}, **sections})


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [((), None), (("*",), "*"), ((PAGE,), PAGE), (("https://other.example",), None)],
)
async def test_preflight(origins: tuple[str, ...], allowed: str | None) -> None:
    async with (
        serving(FakeRouterClient(info=INFO), config=config(*origins)) as service,
        service.http.options("/v1/chat/completions", headers=PREFLIGHT) as response,
    ):
        assert response.headers.get(ALLOW) == allowed
        if allowed is None:
            return
        assert response.status == 200
        assert "authorization" in response.headers["Access-Control-Allow-Headers"].lower()
        assert "POST" in response.headers["Access-Control-Allow-Methods"]


async def test_preflight_needs_no_key_and_a_missing_key_is_readable() -> None:
    keys = {"keys": [{"name": "a", "sha256": key_hash("sk-specray-a")}]}
    async with serving(FakeRouterClient(info=INFO), config=config(PAGE, auth=keys)) as service:
        async with service.http.options("/v1/completions", headers=PREFLIGHT) as response:
            assert (response.status, response.headers[ALLOW]) == (200, PAGE)
        async with service.http.post("/v1/completions", json=TEXT, headers={"Origin": PAGE}) as response:
            assert (response.status, response.headers[ALLOW]) == (401, PAGE)


async def test_every_kind_of_answer_has_the_header() -> None:
    router = FakeRouterClient(info=INFO, errors=[OverloadedError("full"), RuntimeError("a bug")])
    headers = {"Origin": PAGE}
    statuses = []
    async with serving(router, config=config(PAGE)) as service:
        for path, body in [
            *[("/v1/completions", TEXT)] * 4,
            ("/v1/completions", {**TEXT, "n": 0}),
            ("/v1/completions", {**TEXT, "stream": True}),
            ("/v1/files", {}),
            ("/nothing", {}),
        ]:
            async with service.http.post(path, json=body, headers=headers) as response:
                assert response.headers[ALLOW] == PAGE
                assert "x-request-id" in response.headers["Access-Control-Expose-Headers"].lower()
                statuses.append(response.status)
    assert statuses == [429, 500, 200, 200, 400, 200, 400, 404]
