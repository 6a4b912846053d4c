"""Tests of an Ingress's observation of calls: log line, counters, ids and spans."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from specray.config import LoggingConfig, parse_config
from specray.errors import EngineLostError, InvalidRequestError, OverloadedError
from specray.fakes import FakeRouterClient
from specray.interfaces import RouterClient
from specray.requests import GenerateRequest, OutputChunk
from specray.rpc.inference.types import GenerateParams
from specray.serving.admission.api_keys import Keyring, key_hash, new_key
from specray.serving.grpc.handler import GrpcIngress
from specray.serving.metrics import IngressMetrics
from specray.serving.observe import CallObserver
from specray.telemetry.logs import extra_fields
from tests.unit.serving.http.service import INFO, MODEL, TOKENIZER, endless, say, serving, wait_until
from tests.unit.serving.witness import BODY, CONFIG, PROMPT, TRACE, Witness, conventional


class TimedClient(FakeRouterClient):
    """A fake router that also reports the time to the first tokens."""

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        return replace(await super().complete(request), ttft_s=0.25)


async def test_generating_calls_are_counted_under_the_conventions_names(
    caplog: pytest.LogCaptureFixture,
) -> None:
    witness = Witness(caplog)
    client = TimedClient(reply=lambda _: (5, 6, 7), info=INFO)
    async with serving(client, observer=witness.observer) as service:
        await service.post("/v1/completions", BODY)
        await service.post("/v1/completions", {**BODY, "max_tokens": -1})
        await witness.ended()
        async with service.http.get("/metrics?scope=node") as response:
            assert response.status == 200
        async with service.http.get("/metrics?scope=pod") as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "scope")
    labels = [
        ("gen_ai_operation_name", "text_completion"),
        ("gen_ai_provider_name", "specray"),
        ("gen_ai_request_model", MODEL),
        ("gen_ai_response_model", MODEL),
    ]
    value = witness.observer.metrics.value
    assert value("gen_ai_server_request_duration_seconds_count", [*labels, ("error_type", "")]) == 1
    assert value("gen_ai_server_time_to_first_token_seconds_sum", labels) == 0.25
    # Three tokens in a second, of which the first took a quarter.
    assert value("gen_ai_server_time_per_output_token_seconds_sum", labels) == 0.375


async def test_a_completion_is_one_line_with_its_tokens_and_times_and_not_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    witness = Witness(caplog)
    client = TimedClient(reply=lambda _: (5, 6, 7), info=INFO, cached=lambda _: 2)
    async with serving(client, observer=witness.observer) as service:
        status, answer = await service.post("/v1/completions", {**BODY, "n": 2})
        await witness.ended()
    assert status == 200
    assert witness.line() == {
        "message": "POST /v1/completions 200",
        "level": "INFO",
        "request_id": answer["id"],
        "protocol": "http",
        "code": "200",
        "duration_ms": 1000.0,
        "finish_reason": "length",
        "is_stream": False,
        "num_choices": 2,
        "num_prompt_tokens": 2 * len(TOKENIZER.encode(PROMPT)),
        "num_cached_tokens": 4,
        "num_output_tokens": 6,
        "num_draft_tokens": 16,
        "num_accepted_tokens": 8,
        "ttft_ms": 250.0,
        "acceptance_rate": 0.5,
    }
    assert [request.request_id.startswith(answer["id"]) for request in client.requests] == [True, True]
    assert PROMPT not in caplog.text and answer["choices"][0]["text"] not in caplog.text


async def test_a_stream_has_its_time_to_the_first_tokens(caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness(caplog)
    async with serving(say("hello"), observer=witness.observer) as service:
        async with service.http.post("/v1/completions", json={**BODY, "stream": True}) as response:
            await response.read()
        await witness.ended()
    line = witness.line()
    # The clock's looks: arrival, first tokens, end.
    assert (line["ttft_ms"], line["duration_ms"], line["is_stream"]) == (1000.0, 2000.0, True)
    labels = [("protocol", "http"), ("name", "POST /v1/completions")]
    metrics = witness.observer.metrics
    assert metrics.value("specray_ingress_time_to_first_token_seconds_sum", labels) == 1.0
    assert metrics.value("specray_ingress_call_seconds_sum", labels) == 2.0
    assert metrics.value("specray_ingress_calls_total", [*labels, ("code", "200")]) == 1
    assert metrics.value("specray_ingress_calls_in_progress", [("protocol", "http")]) == 0


@pytest.mark.parametrize(
    ("body", "errors", "code", "error"),
    [
        ({**BODY, "max_tokens": -1}, [], "400", "invalid_value"),
        ({**BODY, "model": "other"}, [], "404", "model_not_found"),
        (BODY, [OverloadedError("full", 1.0)], "429", "overloaded"),
        (BODY, [EngineLostError("lost")], "503", "service_unavailable"),
        (BODY, [ValueError("a bug")], "500", "internal_error"),
    ],
)
async def test_a_refusal_says_why_under_the_id_that_its_caller_gets(
    caplog: pytest.LogCaptureFixture, body: object, errors: Sequence[Exception], code: str, error: str
) -> None:
    witness = Witness(caplog)
    client = FakeRouterClient(info=INFO, errors=errors)
    async with serving(client, observer=witness.observer) as service:
        async with service.http.post("/v1/completions", json=body) as response:
            assert response.status == int(code)
            request_id = response.headers["X-Request-Id"]
        await witness.ended()
    line = witness.line()
    assert (line["request_id"], line["code"], line["error"]) == (request_id, code, error)
    assert line["level"] == "INFO"
    assert line.get("finish_reason") == ("error" if errors else None)
    bugs = [record for record in caplog.records if record.getMessage() == "request failed"]
    assert [extra_fields(record)["request_id"] for record in bugs] == [request_id] * (code == "500")


async def test_a_failing_stream_ends_with_its_error_in_the_line(caplog: pytest.LogCaptureFixture) -> None:
    class Breaking(FakeRouterClient):
        async def stream(self, request: GenerateRequest) -> Any:
            yield OutputChunk(request.request_id, (5,))
            raise EngineLostError("lost")

    witness = Witness(caplog)
    async with serving(Breaking(info=INFO), observer=witness.observer) as service:
        async with service.http.post("/v1/completions", json={**BODY, "stream": True}) as response:
            assert b"service_unavailable" in await response.read()
        await witness.ended()
    line = witness.line()
    assert (line["code"], line["error"], line["finish_reason"]) == ("200", "service_unavailable", "error")
    assert line["num_output_tokens"] == 1


@pytest.mark.parametrize(
    ("is_stream", "grace_s", "code"), [(False, 0.0, "499"), (True, 20.0, "499"), (True, 0.0, "200")]
)
async def test_a_client_that_leaves_is_an_abort(
    caplog: pytest.LogCaptureFixture, is_stream: bool, grace_s: float, code: str
) -> None:
    """A stream whose headers have left keeps their status."""
    witness = Witness(caplog)
    client = endless()
    config = parse_config({"served_model_name": MODEL, "http": {"first_token_grace_s": grace_s}})
    async with serving(client, config=config, observer=witness.observer) as service:
        patience = aiohttp.ClientTimeout(total=0.2)
        body = {**BODY, "stream": is_stream}
        call = service.http.post("/v1/completions", json=body, timeout=patience)
        with pytest.raises(TimeoutError):
            async with call as response:
                await response.read()
        await witness.ended()
    line = witness.line()
    assert (line["finish_reason"], line["num_output_tokens"]) == ("abort", 0)
    assert line["code"] == code


@pytest.mark.parametrize(
    ("sent", "is_echoed"),
    [("my-request.1", True), ("a" * 128, True), ("a" * 129, False), ('x" y', False), ("é", False)],
)
async def test_a_request_id_is_echoed_when_it_is_one(
    caplog: pytest.LogCaptureFixture, sent: str, is_echoed: bool
) -> None:
    witness = Witness(caplog)
    headers = {"X-Request-Id": sent}
    async with serving(say("hello"), observer=witness.observer) as service:
        async with service.http.post("/v1/completions", json=BODY, headers=headers) as response:
            answer = await response.json()
            assert response.headers.getall("X-Request-Id") == [sent if is_echoed else answer["id"]]
        await witness.ended()
    line = witness.line()
    assert (line["request_id"], line.get("client_request_id")) == (answer["id"], sent if is_echoed else None)


@pytest.mark.parametrize("path", ["/health", "/nothing", "/v1/models", "/metrics"])
async def test_every_answer_has_an_id_and_other_paths_than_generation_are_quiet(
    caplog: pytest.LogCaptureFixture, path: str
) -> None:
    witness = Witness(caplog)
    async with serving(say("hello"), observer=witness.observer) as service:
        async with service.http.get(path) as response:
            assert response.headers["X-Request-Id"].startswith("call-")
        await witness.ended()
    name = "other" if path == "/nothing" else path
    assert witness.line()["message"].startswith(f"GET {name} ")
    assert witness.line()["level"] == ("INFO" if path == "/nothing" else "DEBUG")


async def test_a_call_without_a_key_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness(caplog)
    key = {"name": "team", "sha256": key_hash(new_key())}
    config = parse_config({"served_model_name": MODEL, "auth": {"keys": [key]}})
    async with serving(say("hello"), observer=witness.observer, config=config) as service:
        assert (await service.post("/v1/completions", BODY))[0] == 401
        await witness.ended()
    assert (witness.line()["code"], witness.line()["error"]) == ("401", "invalid_api_key")


async def test_the_tenant_is_the_keys_and_the_key_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness(caplog)
    key = new_key()
    keys = [{"name": "team", "sha256": key_hash(key), "tenant": "their-tenant"}]
    config = parse_config({"served_model_name": MODEL, "auth": {"keys": keys}})
    headers = {"Authorization": f"Bearer {key}"}
    async with serving(say("hello"), observer=witness.observer, config=config) as service:
        async with service.http.post("/v1/completions", json=BODY, headers=headers) as response:
            assert response.status == 200
        await witness.ended()
    assert witness.line()["tenant"] == "their-tenant"
    assert key not in caplog.text and key_hash(key) not in caplog.text


async def test_lines_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="specray.serving")
    observer = CallObserver(LoggingConfig(requests=False))
    async with serving(say("hello"), observer=observer) as service:
        assert (await service.post("/v1/completions", BODY))[0] == 200
        labels = [("protocol", "http"), ("name", "POST /v1/completions"), ("code", "200")]
        await wait_until(lambda: observer.metrics.value("specray_ingress_calls_total", labels) == 1)
    assert [record for record in caplog.records if record.name == "specray.serving.observe"] == []


def test_an_ingress_that_nobody_has_called_is_in_the_metrics() -> None:
    shown = [line for line in IngressMetrics().text().splitlines() if not line.startswith("#")]
    assert shown == [
        'specray_ingress_calls_in_progress{protocol="http"} 0.0',
        'specray_ingress_calls_in_progress{protocol="grpc"} 0.0',
    ]


async def test_metrics_hold_the_routers_and_the_ingress_own(caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness(caplog)
    async with serving(say("hello"), observer=witness.observer) as service:
        await service.post("/v1/completions", BODY)
        await witness.ended()
        async with service.http.get("/metrics") as response:
            text = await response.text()
    assert "specray_fake_total 1.0" in text.splitlines()
    line = 'specray_ingress_calls_total{code="200",name="POST /v1/completions",protocol="http"} 1.0'
    assert line in text.splitlines()


# Spans


def grpc_ingress(client: RouterClient, witness: Witness) -> GrpcIngress:
    return GrpcIngress(client=client, tokenizer=TOKENIZER, config=CONFIG, observer=witness.observer)


async def test_a_grpc_call_is_told_like_an_http_call(caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness(caplog, is_traced=True)
    client = say("hello")
    params = GenerateParams(text=PROMPT, max_tokens=8, traceparent=TRACE, client_request_id="mine")
    events = [event async for event in grpc_ingress(client, witness).generate(params)]
    line = witness.line()
    assert line["message"] == "Generate OK"
    assert (line["request_id"], line["client_request_id"]) == (events[0].request_id, "mine")
    assert events[-1].usage is not None
    assert line["num_output_tokens"] == events[-1].usage.num_output_tokens
    assert line["ttft_ms"] == 1000.0
    assert client.requests[0].traceparent.startswith(TRACE[:36])
    spans = {span.name: span for span in witness.spans.get_finished_spans()}
    assert spans.keys() == {"Generate", "stream"}
    attributes = conventional(spans["Generate"])
    assert attributes["rpc.system.name"] == "grpc"
    assert attributes["rpc.method"] == "specray.v1.InferenceService/Generate"
    assert attributes["rpc.response.status_code"] == "OK"
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.model"] == MODEL
    assert attributes["gen_ai.response.id"] == events[0].request_id
    assert attributes["gen_ai.usage.output_tokens"] == events[-1].usage.num_output_tokens


@pytest.mark.parametrize(
    ("params", "errors", "code"),
    [
        (GenerateParams(text=PROMPT, max_tokens=0), [], "INVALID_ARGUMENT"),
        (GenerateParams(text=PROMPT), [OverloadedError("full", 1.0)], "RESOURCE_EXHAUSTED"),
        (GenerateParams(text=PROMPT), [ValueError("a bug")], "INTERNAL"),
    ],
)
async def test_a_failed_grpc_call_is_counted_under_its_code(
    caplog: pytest.LogCaptureFixture, params: GenerateParams, errors: Sequence[Exception], code: str
) -> None:
    witness = Witness(caplog)
    ingress = grpc_ingress(FakeRouterClient(info=INFO, errors=errors), witness)
    with pytest.raises((InvalidRequestError, OverloadedError, ValueError)):
        async for _ in ingress.generate(params):
            pass
    assert witness.line()["code"] == code
    labels = [("protocol", "grpc"), ("name", "Generate"), ("code", code)]
    assert witness.observer.metrics.value("specray_ingress_calls_total", labels) == 1


async def test_a_grpc_client_that_leaves_is_an_abort(caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness(caplog)
    client = FakeRouterClient(reply=lambda _: (5, 6, 7), info=INFO)
    events = grpc_ingress(client, witness).generate(GenerateParams(text=PROMPT, max_tokens=8))
    await anext(events)
    await events.aclose()
    assert (witness.line()["code"], witness.line()["finish_reason"]) == ("CANCELLED", "abort")


def test_a_grpc_call_that_gets_to_no_handler_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness(caplog)
    ingress = grpc_ingress(say("hello"), witness)
    try:
        Keyring(parse_config({"auth": {"keys": [{"name": "a", "sha256": "0" * 64}]}}).auth).identify(())
    except Exception as error:
        ingress.refused("Info", error)
    assert (witness.line()["code"], witness.line()["error"]) == ("UNAUTHENTICATED", "invalid_api_key")
