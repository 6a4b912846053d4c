"""Tests of the spans of an Ingress's calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from opentelemetry.trace import StatusCode

from specray.errors import DeadlineExceededError, EngineLostError, OverloadedError
from specray.fakes import FakeRouterClient
from specray.requests import GenerateRequest, OutputChunk
from tests.unit.serving.http.service import INFO, MODEL, say, serving
from tests.unit.serving.witness import BODY, TRACE, Witness, conventional


async def post(service: Any, path: str = "/v1/completions", **headers: str) -> aiohttp.ClientResponse:
    async with service.http.post(path, json=BODY, headers=headers) as response:
        await response.read()
        return response  # type: ignore[no-any-return]


async def test_a_trace_goes_from_the_caller_through_the_ingress_to_the_router(
    caplog: pytest.LogCaptureFixture,
) -> None:
    witness = Witness(caplog, is_traced=True)
    client = say("hello")
    async with serving(client, observer=witness.observer) as service:
        await post(service, traceparent=TRACE)
        await witness.ended()
    (span,) = witness.spans.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert span.parent is not None and f"{span.parent.span_id:016x}" == TRACE.split("-")[2]
    own = f"00-{TRACE.split('-')[1]}-{span.context.span_id:016x}-01"
    assert [request.traceparent for request in client.requests] == [own]
    assert witness.line()["trace_id"] == TRACE.split("-")[1]
    attributes = dict(span.attributes or {})
    assert attributes["specray.request_id"] == witness.line()["request_id"]
    assert attributes["specray.num_output_tokens"] == witness.line()["num_output_tokens"]
    shown = json.dumps(attributes)
    assert "hello" not in shown


async def test_a_span_says_what_was_asked_and_answered_in_the_words_of_the_conventions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    witness = Witness(caplog, is_traced=True)
    client = FakeRouterClient(reply=lambda _: (5, 6, 7), info=INFO, cached=lambda _: 2)
    asked = {"n": 2, "temperature": 0.5, "top_p": 0.75, "top_k": 9, "seed": -1, "stop": ["secret"]}
    penalties = {"frequency_penalty": 0.25, "presence_penalty": -0.5}
    async with serving(client, observer=witness.observer) as service:
        headers = {"User-Agent": "tester/1"}
        body = {**BODY, **asked, **penalties}
        async with service.http.post("/v1/completions?key=secret", json=body, headers=headers) as response:
            answer = await response.json()
        await witness.ended()
    (span,) = witness.spans.get_finished_spans()
    assert conventional(span) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "server.address": "127.0.0.1",
        "server.port": int(service.url.rpartition(":")[2]),
        "user_agent.original": "tester/1",
        "network.protocol.version": "1.1",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "specray",
        "gen_ai.system": "specray",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 9,
        "gen_ai.request.frequency_penalty": 0.25,
        "gen_ai.request.presence_penalty": -0.5,
        "gen_ai.request.seed": -1,
        "gen_ai.request.stream": False,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.model": answer["model"],
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
    }
    assert "secret" not in str(span.to_json())


async def test_a_streamed_chat_has_its_operation_and_the_time_to_its_first_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    witness = Witness(caplog, is_traced=True)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "stream": True, "seed": 7}
    async with serving(say("hello"), observer=witness.observer) as service:
        async with service.http.post("/v1/chat/completions", json=body) as response:
            await response.read()
        await witness.ended()
    span = next(span for span in witness.spans.get_finished_spans() if span.name != "stream")
    attributes = conventional(span)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert (attributes["gen_ai.request.seed"], attributes["gen_ai.request.stream"]) == (7, True)
    # The clock's looks: arrival, first tokens, end.
    assert attributes["gen_ai.response.time_to_first_chunk"] == 1.0
    for name in ("top_p", "top_k", "frequency_penalty", "presence_penalty", "choice.count"):
        assert f"gen_ai.request.{name}" not in attributes


@pytest.mark.parametrize(
    ("body", "errors", "code", "error"),
    [
        ({**BODY, "max_tokens": -1}, [], 400, None),
        ({**BODY, "model": "other"}, [], 404, None),
        (BODY, [OverloadedError("full", 1.0)], 429, None),
        (BODY, [EngineLostError("lost")], 503, "service_unavailable"),
        (BODY, [DeadlineExceededError("late")], 504, "deadline_exceeded"),
        (BODY, [ValueError("a bug")], 500, "internal_error"),
    ],
)
async def test_only_an_error_of_the_service_makes_a_span_an_error(
    caplog: pytest.LogCaptureFixture,
    body: object,
    errors: Sequence[Exception],
    code: int,
    error: str | None,
) -> None:
    witness = Witness(caplog, is_traced=True)
    async with serving(FakeRouterClient(info=INFO, errors=errors), observer=witness.observer) as service:
        await service.post("/v1/completions", body)
        await witness.ended()
    (span,) = witness.spans.get_finished_spans()
    attributes = dict(span.attributes or {})
    assert attributes["http.response.status_code"] == code
    assert attributes.get("error.type") == error
    assert (span.status.status_code, span.status.description) == (
        (StatusCode.UNSET, None) if error is None else (StatusCode.ERROR, error)
    )
    # What the log line calls an error is told in any case.
    assert "specray.error" in attributes


async def test_a_stream_that_fails_behind_its_status_is_an_error_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Breaking(FakeRouterClient):
        async def stream(self, request: GenerateRequest) -> Any:
            yield OutputChunk(request.request_id, (5,))
            raise EngineLostError("lost")

    witness = Witness(caplog, is_traced=True)
    async with serving(Breaking(info=INFO), observer=witness.observer) as service:
        async with service.http.post("/v1/completions", json={**BODY, "stream": True}) as response:
            await response.read()
        await witness.ended()
    span = next(span for span in witness.spans.get_finished_spans() if span.name != "stream")
    attributes = dict(span.attributes or {})
    assert (attributes["http.response.status_code"], attributes["error.type"]) == (200, "service_unavailable")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes["gen_ai.response.finish_reasons"] == ()


async def test_paths_that_do_not_generate_are_not_traced(caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness(caplog, is_traced=True)
    async with serving(say("hello"), observer=witness.observer) as service:
        async with service.http.get("/health", headers={"traceparent": TRACE}) as response:
            assert response.status == 200
        await witness.ended()
    assert witness.spans.get_finished_spans() == ()


async def test_without_tracing_the_callers_trace_ends_here(caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness(caplog)
    client = say("hello")
    async with serving(client, observer=witness.observer) as service:
        await post(service, traceparent=TRACE)
    assert [request.traceparent for request in client.requests] == [""]


# gRPC
