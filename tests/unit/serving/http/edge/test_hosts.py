"""Names under which the service answers, and that no other gets anything from it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from specray.config import HttpConfig, parse_config
from specray.fakes import FakeRouterClient
from specray.serving.admission.api_keys import key_hash
from specray.serving.http.edge.hosts import host_test
from tests.unit.serving.http.service import INFO, MODEL, serving

PATHS = ("/health", "/v1/models", "/metrics", "/lab", "/v1/completions", "/nothing")


async def answer_to(service_url: str, head: bytes) -> bytes:
    """Returns the answer to a raw head, which lacks its end."""
    port = int(service_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + b"Connection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.nip.io", "localhost.evil.example"]
)
async def test_page_of_another_name_gets_nothing_from_a_service_of_this_machine(host: str) -> None:
    async with serving(FakeRouterClient(info=INFO)) as service:
        for path in PATHS:
            async with service.http.get(path, headers={"Host": host}) as response:
                assert response.status == 421
                last = await response.text()
        assert json.loads(last)["error"] == {
            "message": f"Host is '{host}', which is no name of this service; http.allowed_hosts lists them",
            "type": "invalid_request_error",
            "param": None,
            "code": "misdirected_request",
        }


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.8.9.1:1", "[::1]:8000", "localhost."]
)
async def test_names_of_this_machine_are_answered(host: str) -> None:
    async with (
        serving(FakeRouterClient(info=INFO)) as service,
        service.http.get("/health", headers={"Host": host}) as response,
    ):
        assert response.status == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "a b",
        "a/b",
        "user@a",
        "a:b",
        "a:65536",
        "[::1",
        "[zz]",
        "::1",
        "a:1:2",
        "a,b",
        "http://a",
        "a%00",
        "\u00e9",
    ],
)
async def test_what_is_no_host_is_400(host: str) -> None:
    async with serving(FakeRouterClient(info=INFO)) as service:
        answer = await answer_to(service.url, b"GET /health HTTP/1.1\r\nHost: " + host.encode() + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")


async def test_host_of_an_absolute_target_counts_and_its_path_is_served() -> None:
    async with serving(FakeRouterClient(info=INFO)) as service:
        for target, status in (
            (b"http://localhost:1/health", b"200"),
            (b"http://evil.example/health", b"421"),
        ):
            head = b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n"
            assert (await answer_to(service.url, head)).split(b" ")[1] == status


async def test_without_host_only_http_1_0_is_answered() -> None:
    async with serving(FakeRouterClient(info=INFO)) as service:
        assert (await answer_to(service.url, b"GET /health HTTP/1.0\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await answer_to(service.url, b"GET /health HTTP/1.1\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_any_name_is_answered_where_a_key_is_asked_for() -> None:
    auth = {"keys": [{"name": "a", "sha256": key_hash("sk-specray-a")}]}
    config = parse_config({"served_model_name": MODEL, "auth": auth})
    async with (
        serving(FakeRouterClient(info=INFO), config=config) as service,
        service.http.get("/health", headers={"Host": "llm.example.com"}) as response,
    ):
        assert response.status == 200


@pytest.mark.parametrize(
    ("http", "options", "allowed", "refused"),
    [
        (
            {},
            {},
            ["localhost", "127.0.0.1", "[::1]", "build-7"],
            ["a.example", "10.0.0.1", "[fe80::1]", "0.0.0.0"],
        ),
        ({"host": "localhost"}, {}, ["localhost"], ["a.example"]),
        ({"host": "::1"}, {}, ["localhost"], ["a.example"]),
        ({"host": "0.0.0.0"}, {}, ["a.example", "10.0.0.1"], []),
        ({"host": "10.0.0.1"}, {}, ["a.example"], []),
        ({}, {"is_elsewhere": True}, ["a.example"], []),
        ({"allowed_hosts": []}, {}, ["localhost", "127.0.0.1"], ["build-7", "a.example"]),
        (
            {"allowed_hosts": ["A.example"], "host": "0.0.0.0"},
            {},
            ["a.example", "[::1]"],
            ["b.example", "x.a.example"],
        ),
        ({"allowed_hosts": ["a.example"]}, {"is_elsewhere": True}, ["a.example"], ["b.example"]),
        ({"allowed_hosts": ["*"]}, {}, ["a.example"], []),
    ],
)
def test_configuration_says_which_names_are_ours(
    http: dict[str, Any], options: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    is_ours = host_test(HttpConfig(**http), asks_for_key=lambda: False, **options)
    assert [name for name in (*allowed, *refused) if is_ours(name)] == allowed
