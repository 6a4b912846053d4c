"""Tests of bad input: a 4xx that names the field and what is allowed, and nothing reaches the router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specray.config import parse_config
from specray.fakes import FakeRouterClient
from tests.unit.serving.http.service import INFO, MAX_MODEL_LEN, MODEL, Service, serving

NAN, INF = float("nan"), float("inf")
TEXT = {"prompt": "def"}


pytestmark = pytest.mark.asyncio(loop_scope="module")


CONFIG = parse_config({"served_model_name": MODEL, "http": {"max_body_bytes": 8192}})


async def post(
    service: Service, path: str, body: bytes, content_type: str | None = "application/json"
) -> Any:
    headers = {} if content_type is None else {"Content-Type": content_type}
    skip = ["Content-Type"] if content_type is None else []
    async with service.http.post(path, data=body, headers=headers, skip_auto_headers=skip) as response:
        return response.status, await response.json(), response.headers


# Fields of /v1/completions beside the prompt -> (param, part of the message)
BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "'hot'; allowed: a valid number in 0..2"),
    ({"temperature": True}, "temperature", "allowed: a valid number"),
    ({"temperature": -0.1}, "temperature", "-0.1; allowed: 0..2"),
    ({"temperature": 2.1}, "temperature", "2.1; allowed: 0..2"),
    ({"temperature": NAN}, "temperature", "nan; allowed: 0..2"),
    ({"temperature": INF}, "temperature", "inf; allowed: 0..2"),
    ({"temperature": 10**400}, "temperature", "allowed: a valid number"),
    ({"top_p": 0}, "top_p", "0.0; allowed: more than 0 and at most 1"),
    ({"top_p": NAN}, "top_p", "nan"),
    ({"top_p": 1.01}, "top_p", "1.01"),
    ({"top_k": -2}, "top_k", "-2; allowed: -1..2147483647"),
    ({"top_k": 1.5}, "top_k", "allowed: a valid integer"),
    ({"min_p": -0.5}, "min_p", "-0.5; allowed: 0..1"),
    ({"min_p": NAN}, "min_p", "nan"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.0; allowed: 0.015625..64"),
    ({"repetition_penalty": NAN}, "repetition_penalty", "nan"),
    ({"presence_penalty": -2.5}, "presence_penalty", "-2.5; allowed: -2..2"),
    ({"frequency_penalty": NAN}, "frequency_penalty", "nan; allowed: -2..2"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "101.0; allowed: -100..100"),
    ({"logit_bias": {"5": NAN}}, "logit_bias", "nan"),
    ({"logit_bias": {"9999": 1}}, "logit_bias", "9999; allowed: 0..263"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "digits"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ({"logit_bias": [1]}, "logit_bias", "dictionary"),
    ({"seed": "a"}, "seed", "a valid integer"),
    ({"seed": 1.5}, "seed", "a valid integer"),
    ({"seed": 1 << 64}, "seed", "allowed: -9223372036854775808..18446744073709551615"),
    ({"stop": 5}, "stop", "a string or a list of strings"),
    ({"stop": [""]}, "stop", "0; allowed: 1..256"),
    ({"stop": [None]}, "stop", "a string or a list of strings"),
    ({"stop": ["x"] * 65}, "stop", "65; allowed: 0..64"),
    ({"stop_token_ids": [264]}, "stop_token_ids", "264; allowed: 0..263"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"stop_token_ids": 5}, "stop_token_ids", "list"),
    ({"max_tokens": -1}, "max_tokens", "-1; allowed: 1..2147483647"),
    ({"max_tokens": -5}, "max_tokens", "-5; allowed: 1..2147483647"),
    ({"max_tokens": "5"}, "max_tokens", "a valid integer"),
    ({"max_tokens": 2**70}, "max_tokens", "allowed: 1..2147483647"),
    ({"min_tokens": 17}, "min_tokens", "17; allowed: 0..16"),
    ({"min_tokens": -1}, "min_tokens", "-1"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "5; allowed: 0..4"),
    ({"n": 0}, "n", "0; allowed: 1..128"),
    ({"n": 1000}, "n", "1000; allowed: 1..128"),
    ({"n": -1}, "n", "-1"),
    ({"n": 1.0}, "n", "a valid integer"),
    ({"n": True}, "n", "a valid integer"),
    ({"logprobs": 21}, "logprobs", "21; allowed: 0..20"),
    ({"logprobs": -1}, "logprobs", "-1"),
    ({"logprobs": True}, "logprobs", "a valid integer"),
    ({"ignore_eos": "yes"}, "ignore_eos", "a valid boolean"),
    ({"stream": 1}, "stream", "a valid boolean"),
    ({"stream": True, "temperature": 9}, "temperature", "9.0; allowed: 0..2"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not a field"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo", "stream false"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream false"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "21; allowed: 0..20"),
    ({"speculation": 5}, "speculation", "allowed"),
    ({"speculation": {"enabled": "no"}}, "speculation.enabled", "a valid boolean"),
    ({"speculation": {"num_speculative_tokens": 33}}, "speculation.num_speculative_tokens", "allowed: 0..32"),
    ({"speculation": {"num_speculative_tokens": -1}}, "speculation.num_speculative_tokens", "-1"),
    ({"speculation": {"verification": "none"}}, "speculation.verification", "coupled or rejection"),
    ({"speculation": {"k": 3}}, "speculation.k", "not a field"),
    ({"speculation": {"draft": "n-gram"}}, "speculation.draft", "lookahead or model or ngram or suffix"),
    ({"speculation": {"draft": 1}}, "speculation.draft", "a valid string"),
    ({"speculation": {"tenant": "x" * 65}}, "speculation.tenant", "65; allowed: 0..64"),
    ({"speculation": {"tenant": 5}}, "speculation.tenant", "a valid string"),
    ({"priority": 1.5}, "priority", "a valid integer"),
    ({"priority": 1 << 63}, "priority", "allowed: -9223372036854775808..9223372036854775807"),
    ({"timeout_s": 0}, "timeout_s", "0.0; allowed: more than 0 and at most 86400"),
    ({"timeout_s": NAN}, "timeout_s", "nan"),
    ({"slo": {"itl_ms": 0}}, "slo.itl_ms", "0.0; allowed: more than 0 and at most 86400000"),
    ({"slo": {"ttft_ms": NAN}}, "slo.ttft_ms", "nan"),
    ({"slo": {"tpot_ms": 5}}, "slo.tpot_ms", ""),
    ({"timeout_s": "5"}, "timeout_s", "a valid number"),
    ({"best_of": 2}, "best_of", "2"),
    ({"best_of": True}, "best_of", "True"),
    ({"suffix": "x"}, "suffix", "not support"),
    ({"tools": [{}]}, "tools", "not support"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or json_schema"),
    ({"use_beam_search": True}, "use_beam_search", "not support"),
    ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_json": {}, "ignore_eos": True}, "ignore_eos", "together with guided_json"),
    ({"guided_regex": "a+", "min_tokens": 2}, "min_tokens", "together with guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"temprature": 1}, "temprature", "not a field"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "0; allowed: 1..4096"),
    ({"allowed_token_ids": [264]}, "allowed_token_ids", "264; allowed: 0..263"),
    ({"allowed_token_ids": [1], "min_tokens": 1}, "allowed_token_ids", "stop tokens alone"),
    ({"allowed_token_ids": [5], "guided_regex": "a"}, "allowed_token_ids", "together with guided_regex"),
    ({"bad_words": ["a"], "guided_regex": "a"}, "bad_words", "together with guided_regex"),
    ({"bad_words": [""]}, "bad_words", "0; allowed: 1..256"),
    ({"bad_words": ["x"] * 129}, "bad_words", "129; allowed: 0..128"),
    ({"bad_words": [5]}, "bad_words[0]", "a valid string"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0; allowed: -1 or 1..63"),
    ({"truncate_prompt_tokens": 64}, "truncate_prompt_tokens", "64; allowed: -1 or 1..63"),
    ({"cache_salt": "x" * 257}, "cache_salt", "257; allowed: 0..256"),
    ({"cache_salt": 5}, "cache_salt", "a valid string"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens", "a valid boolean"),
    ({"model": "gpt-9"}, "model", "'gpt-9' is not served here; allowed: 'tiny'"),
    ({"model": 5}, "model", "a valid string"),
]  # fmt: skip

BAD_PROMPTS: list[tuple[Any, str]] = [
    (None, "missing"),
    ("", "empty"),
    ([], "empty"),
    ([[]], "empty"),
    ([""], "empty"),
    (["a", ""], "empty"),
    (5, "allowed: a string, a list of strings"),
    ({"text": "a"}, "allowed: a string"),
    (["a", 5], "allowed: a string"),
    ([[5], ["a"]], "allowed: a string"),
    ([5, True], "allowed: a string"),
    ([1.5], "allowed: a string"),
    ([264], "264; allowed: 0..263"),
    ([-1], "-1; allowed: 0..263"),
    ([2**70], "allowed: 0..263"),
    ([[5], [5, 264]], "264; allowed: 0..263"),
    ("x" * MAX_MODEL_LEN, "64; allowed: 1..63"),
    ([5] * 2000, "2000; allowed: 1..63"),
    (["a"] * 129, "129; allowed: 1..128"),
]


@pytest.mark.parametrize(("fields", "param", "part"), BAD_FIELDS, ids=lambda value: str(value)[:50])
async def test_completions_refuse_a_field(
    service: Service, router: FakeRouterClient, fields: dict[str, Any], param: str, part: str | None
) -> None:
    body = json.dumps({**TEXT, **fields}).encode()
    status, answer, _ = await post(service, "/v1/completions", body)
    if part is None:
        assert status == 200
        return
    assert status == (404 if "not served" in part else 400), answer
    error = answer["error"]
    assert error["param"] == param
    assert param.split(".")[-1] in error["message"]
    assert part in error["message"]
    assert error["type"] == "invalid_request_error"
    assert router.requests == []


@pytest.mark.parametrize(("prompt", "part"), BAD_PROMPTS, ids=lambda value: str(value)[:30])
async def test_completions_refuse_a_prompt(
    service: Service, router: FakeRouterClient, prompt: Any, part: str
) -> None:
    status, answer, _ = await post(service, "/v1/completions", json.dumps({"prompt": prompt}).encode())
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert part in answer["error"]["message"]
    assert router.requests == []


async def test_field_of_another_type_names_no_range_of_its_namesake(service: Service) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": 1}
    _, answer, _ = await post(service, "/v1/chat/completions", json.dumps(chat).encode())
    assert answer["error"]["message"] == "logprobs is 1; allowed: a valid boolean"
    body = {**TEXT, "logit_bias": {"n": "x"}}
    _, answer, _ = await post(service, "/v1/completions", json.dumps(body).encode())
    assert answer["error"]["message"] == "logit_bias.n is 'x'; allowed: a valid number"


async def test_prompt_and_max_tokens_together_are_bounded_where_more_is_refused() -> None:
    config = parse_config({"served_model_name": MODEL, "ingress": {"excess_max_tokens": "refuse"}})
    async with serving(FakeRouterClient(info=INFO), config=config) as service:
        await check_that_more_is_refused(service)


async def check_that_more_is_refused(service: Service) -> None:
    for max_tokens in (64, 2**31 - 1):
        body = {**TEXT, "max_tokens": max_tokens}
        status, answer, _ = await post(service, "/v1/completions", json.dumps(body).encode())
        assert (status, answer["error"]["param"]) == (400, "max_tokens")
        assert answer["error"]["message"] == f"max_tokens is {max_tokens}; allowed: 1..63"
    body = {"prompt": [5] * 10, "max_tokens": 55}
    status, answer, _ = await post(service, "/v1/completions", json.dumps(body).encode())
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    allowed = "55; allowed: 1..54 after a prompt of 10 tokens"
    assert f"{allowed}; this model's maximum context length is 64 tokens" in answer["error"]["message"]
    assert answer["error"]["code"] == "context_length_exceeded"
    status, _, _ = await post(service, "/v1/completions", json.dumps({**body, "max_tokens": 54}).encode())
    assert status == 200


async def test_code_tells_a_prompt_that_is_too_long_from_other_bad_prompts(service: Service) -> None:
    codes = []
    for prompt in ([5] * 63, [5] * 64, [264] * 63, []):
        status, answer, _ = await post(service, "/v1/completions", json.dumps({"prompt": prompt}).encode())
        codes.append("fine" if status == 200 else answer["error"]["code"])
    assert codes == ["fine", "context_length_exceeded", "invalid_value", "invalid_value"]
    body = {"messages": [{"role": "user", "content": "x" * 64}]}
    _, answer, _ = await post(service, "/v1/chat/completions", json.dumps(body).encode())
    assert (answer["error"]["param"], answer["error"]["code"]) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"prompt": "a",}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),  # a lone surrogate is no text
        (b'{"prompt": "\xff"}', "invalid_utf8"),
        ('{"prompt": "a"}'.encode("utf-16"), "invalid_utf8"),
    ],
    ids=["empty", "cut", "comma", "deep", "surrogate", "latin1", "utf16"],
)
async def test_body_that_is_not_json_in_utf8_is_refused(service: Service, body: bytes, code: str) -> None:
    status, answer, _ = await post(service, "/v1/completions", body[:8000])
    assert (status, answer["error"]["code"]) == (400, code)


@pytest.mark.parametrize("body", [b"[]", b"5", b'"a"', b"null"])
async def test_body_that_is_no_object_is_refused(service: Service, body: bytes) -> None:
    status, answer, _ = await post(service, "/v1/completions", body)
    assert status == 400
    assert "allowed: a JSON object" in answer["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
async def test_other_content_types_are_415(service: Service, kind: str | None) -> None:
    status, answer, _ = await post(service, "/v1/completions", b'{"prompt": "a"}', kind)
    assert status == 415
    assert "allowed: application/json" in answer["error"]["message"]


async def test_content_type_with_a_charset_is_json(service: Service) -> None:
    kind = "Application/JSON; charset=utf-8"
    assert (await post(service, "/v1/completions", b'{"prompt": "a"}', kind))[0] == 200


async def test_ten_megabytes_are_413(service: Service) -> None:
    status, answer, headers = await post(service, "/v1/completions", b'{"prompt": "' + b"a" * 10_000_000)
    assert status == 413
    assert "allowed: 8192 bytes" in answer["error"]["message"]
    assert headers["Connection"] == "close"


async def test_ten_megabytes_in_chunks_without_a_length_are_413(service: Service) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"a" * 100_000

    headers = {"Content-Type": "application/json"}
    async with service.http.post("/v1/completions", data=chunks(), headers=headers) as response:
        assert response.status == 413


async def test_body_of_exactly_the_limit_is_read(service: Service) -> None:
    body = json.dumps({"prompt": "a", "user": ""}).encode()
    body = json.dumps({"prompt": "a", "user": "u" * (8192 - len(body))}).encode()
    assert len(body) == 8192
    assert (await post(service, "/v1/completions", body))[0] == 200
    assert (await post(service, "/v1/completions", body + b" "))[0] == 413


async def test_body_that_stops_coming_leaves_no_work_behind(
    service: Service, router: FakeRouterClient
) -> None:
    port = int(service.url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        "Content-Length: 100",
    ]
    writer.write("\r\n".join([*head, "Content-Length: 100", "", '{"prompt"']).encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with service.http.get("/health") as response:
        assert response.status == 200
    assert router.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_and_methods(
    service: Service, method: str, path: str, status: int, code: str
) -> None:
    async with service.http.request(method, path) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == code
        assert ("Allow" in response.headers) == (status == 405)


async def test_unknown_model_is_404_on_its_own_path(service: Service) -> None:
    async with service.http.get("/v1/models/gpt-9") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")


async def test_harmless_fields_and_null_are_ignored(service: Service) -> None:
    body = {
        **TEXT, "user": "u", "metadata": {"a": 1}, "store": True, "service_tier": "auto", "best_of": None,
        "suffix": None, "temperature": None, "n": None, "stop": None, "anything": None, "logit_bias": {},
        "parallel_tool_calls": False, "response_format": {"type": "text"}, "tools": [], "model": MODEL,
    }  # fmt: skip
    assert (await post(service, "/v1/completions", json.dumps(body).encode()))[0] == 200


async def test_error_says_nothing_of_a_bug() -> None:
    class Broken(FakeRouterClient):
        async def complete(self, request: object) -> Any:
            raise RuntimeError("secret detail")

    async with serving(Broken(info=INFO)) as service:
        status, answer, _ = await post(service, "/v1/completions", b'{"prompt": "a"}')
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(answer)
