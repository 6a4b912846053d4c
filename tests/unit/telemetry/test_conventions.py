"""Tests of attributes by the semantic conventions: values that an exporter takes, of bounded length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specray.requests import GenerateRequest
from specray.telemetry.conventions import HttpCall, request_attributes
from specray.types import SamplingParams

CALL = HttpCall(
    method="POST",
    known_method="POST",
    route="/v1/completions",
    path="/v1/completions",
    scheme="https",
    host="llm.example.com",
    user_agent="",
    version="1.1",
)


@pytest.mark.parametrize(
    ("host", "scheme", "address", "port"),
    [
        ("llm.example.com", "https", "llm.example.com", 443),
        ("llm.example.com", "http", "llm.example.com", 80),
        ("llm.example.com:8000", "http", "llm.example.com", 8000),
        ("[::1]:8000", "http", "::1", 8000),
        ("[::1]", "http", "::1", 80),
        ("a:99999", "http", "a:99999", 80),
        ("a:٣", "http", "a:٣", 80),
        ("", "http", None, 80),
    ],
)
def test_the_host_header_is_the_servers_address_and_port(
    host: str, scheme: str, address: str | None, port: int
) -> None:
    attributes = replace(CALL, host=host, scheme=scheme).attributes()
    assert (attributes.get("server.address"), attributes.get("server.port")) == (address, port)


def test_what_a_caller_writes_is_cut_and_what_is_absent_has_no_attribute() -> None:
    long = replace(CALL, path="/v1/completions/" + "a" * 1000, user_agent="b" * 1000, route=None)
    attributes = long.attributes()
    assert len(str(attributes["url.path"])) == len(str(attributes["user_agent.original"])) == 256
    assert "http.route" not in attributes
    assert "user_agent.original" not in CALL.attributes()


def test_a_method_that_http_does_not_have_is_named_apart() -> None:
    attributes = replace(CALL, method="BREW", known_method=None).attributes()
    assert (attributes["http.request.method"], attributes["http.request.method_original"]) == (
        "_OTHER",
        "BREW",
    )
    assert "http.request.method_original" not in CALL.attributes()


@pytest.mark.parametrize(
    ("seed", "shown"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1)]
)
def test_a_seed_fits_the_signed_number_that_an_attribute_is(seed: int, shown: int) -> None:
    request = GenerateRequest("cmpl-1-0-0", (1,), SamplingParams(seed=seed), max_tokens=3)
    attributes = request_attributes("m", [request], num_choices=1, is_stream=False)
    assert attributes["gen_ai.request.seed"] == shown
