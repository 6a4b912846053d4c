"""A path with a slash at its end is the path without, and never a redirect."""

from __future__ import annotations

from typing import Any

import pytest

from specray.config import parse_config
from specray.fakes import FakeRouterClient
from specray.serving.admission.api_keys import key_hash
from tests.unit.serving.http.service import INFO, MODEL, TEXT, serving


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/completions//"])
async def test_call_with_a_slash_at_its_end_is_answered(path: str) -> None:
    router = FakeRouterClient(info=INFO)
    headers = {"X-Forwarded-Proto": "https"}
    async with (
        serving(router) as service,
        service.http.post(path, json=TEXT, headers=headers, allow_redirects=False) as response,
    ):
        assert (response.status, "Location" in response.headers) == (200, False)
    assert len(router.requests) == 1


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/models/", 200), ("/health/", 200), ("/", 404), ("//", 404)]
)
async def test_other_paths(path: str, status: int) -> None:
    async with (
        serving(FakeRouterClient(info=INFO)) as service,
        service.http.get(path, allow_redirects=False) as response,
    ):
        assert response.status == status


async def test_slash_does_not_open_a_path_that_needs_a_key() -> None:
    values: dict[str, Any] = {"auth": {"keys": [{"name": "a", "sha256": key_hash("sk-specray-a")}]}}
    config = parse_config({"served_model_name": MODEL, **values})
    async with serving(FakeRouterClient(info=INFO), config=config) as service:
        for path, status in [("/v1/models/", 401), ("/health/", 200)]:
            async with service.http.get(path) as response:
                assert response.status == status
