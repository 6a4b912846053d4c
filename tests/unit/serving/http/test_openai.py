"""Tests of the endpoints with the unmodified openai client and with plain HTTP."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest

from specray.config import parse_config
from specray.errors import DeadlineExceededError, EngineLostError, InvalidRequestError, OverloadedError
from specray.fakes import FakeRouterClient
from specray.requests import FinishReason, GenerateRequest, OutputChunk, SpeculationParams
from specray.tokenization import make_stop_matcher
from specray.types import DraftKind, Verification
from tests.unit.serving.http.service import (
    INFO,
    MODEL,
    REPLY,
    TOKENIZER,
    RealClock,
    Service,
    endless,
    say,
    serving,
    wait_until,
)
from tests.unit.tokenization.tiny_tokenizer import EOS, PIECES, sentencepiece_tokenizer

NUM_REPLY = len(TOKENIZER.encode(REPLY))
USER = [{"role": "user", "content": "hi"}]


def client_of(service: Service, **options: Any) -> openai.AsyncOpenAI:
    options = {"max_retries": 0, "timeout": 20, **options}
    return openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", **options)


async def events_of(service: Service, path: str, body: dict[str, Any]) -> list[Any]:
    """Returns the decoded events of a stream, without the [DONE] that must end it."""
    async with service.http.post(path, json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        parts = (await response.read()).decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def test_openai_completions() -> None:
    async with serving(say(REPLY, then=(EOS,))) as service, client_of(service) as client:
        answer = await client.completions.create(model=MODEL, prompt="def", max_tokens=50, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (REPLY, "stop")
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.usage is not None
    # The end-of-sequence token is generated, though it is no text.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, NUM_REPLY + 1)
    assert answer.usage.total_tokens == NUM_REPLY + 2


async def test_openai_completions_streaming() -> None:
    async with serving(say(REPLY)) as service, client_of(service) as client:
        stream = await client.completions.create(
            model=MODEL, prompt="def", max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TOKENIZER.decode(
        TOKENIZER.encode(REPLY)[:8]
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_openai_chat() -> None:
    router = say(REPLY, then=(EOS,))
    async with serving(router) as service, client_of(service) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": "hi"}],
        )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", REPLY)
    assert choice.finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    (request,) = router.requests
    assert TOKENIZER.decode(request.prompt_token_ids) == "[system]x[user]hi[assistant]"
    # Without max_tokens a chat may use the rest of the context.
    assert request.max_tokens == INFO.max_model_len - len(request.prompt_token_ids)


async def test_openai_chat_streaming() -> None:
    async with serving(say(REPLY, then=(EOS,))) as service, client_of(service) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REPLY
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


async def test_openai_logprobs_of_both_apis() -> None:
    async with serving(say("aé")) as service, client_of(service) as client:
        completion = await client.completions.create(model=MODEL, prompt="a", max_tokens=3, logprobs=2)
        chat = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1
        )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 1]
    assert logprobs.top_logprobs == [{"a": -0.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}]
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert [(entry.token, entry.logprob, entry.bytes) for entry in content[:2]] == [
        ("a", -0.5, [0x61]),
        ("bytes:\\xc3", -0.5, [0xC3]),
    ]
    assert [top.token for top in content[0].top_logprobs] == ["a"]


async def test_openai_models() -> None:
    async with serving(say(REPLY)) as service, client_of(service) as client:
        assert [model.id async for model in await client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (OverloadedError("queues are full", retry_after_s=2.5), openai.RateLimitError, 429),
        (DeadlineExceededError("the time of 1 s ended"), openai.InternalServerError, 504),
        (EngineLostError("the target is lost"), openai.InternalServerError, 503),
        (InvalidRequestError("too long", field="prompt"), openai.BadRequestError, 400),
        (RuntimeError("a bug"), openai.InternalServerError, 500),
    ],
    ids=["overloaded", "late", "lost", "invalid", "bug"],
)
async def test_errors_before_the_first_token_have_their_status(
    error: Exception, kind: type[openai.APIStatusError], status: int, is_stream: bool
) -> None:
    async with serving(FakeRouterClient(info=INFO, errors=[error])) as service, client_of(service) as client:
        with pytest.raises(kind) as caught:
            await client.completions.create(model=MODEL, prompt="a", stream=is_stream)
    assert caught.value.status_code == status
    expected = {429: "3", 503: "1"}.get(status)
    assert caught.value.response.headers.get("Retry-After") == expected
    assert caught.value.response.headers.get("Retry-After-Ms") == {429: "2500"}.get(status)


async def test_openai_client_retries_an_overload_by_itself() -> None:
    router = FakeRouterClient(info=INFO, errors=[OverloadedError("full", retry_after_s=0.1)])
    async with serving(router) as service, client_of(service, max_retries=1) as client:
        answer = await client.completions.create(model=MODEL, prompt="a", max_tokens=2)
    assert answer.choices[0].text == "aa"
    assert len(router.requests) == 2


class FailingLate(FakeRouterClient):
    """A router that loses the target after one chunk."""

    async def stream(self, request: GenerateRequest) -> Any:
        yield OutputChunk(request.request_id, TOKENIZER.encode("a"))
        raise EngineLostError("the target was lost")


async def test_error_after_the_first_token_is_an_event_that_the_client_raises() -> None:
    async with serving(FailingLate(info=INFO)) as service:
        events = await events_of(service, "/v1/completions", {"prompt": "a", "stream": True})
        async with client_of(service) as client:
            stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
            with pytest.raises(openai.APIError, match="the target was lost"):
                async for _ in stream:
                    pass
    assert events[0]["choices"][0]["text"] == "a"
    assert events[1]["error"]["code"] == "service_unavailable"
    assert len(events) == 2


class Ending(FakeRouterClient):
    """A router that ends every request for a reason of its own."""

    def __init__(self, reason: FinishReason) -> None:
        super().__init__(info=INFO)
        self._reason = reason

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        return OutputChunk(request.request_id, (5,), finish_reason=self._reason, message="the reason why")


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.ABORT, 503)])
async def test_request_that_the_router_gives_up_is_no_success(reason: FinishReason, status: int) -> None:
    async with serving(Ending(reason)) as service:
        answered, answer = await service.post("/v1/completions", {"prompt": "a"})
    assert (answered, answer["error"]["message"]) == (status, "the reason why")


async def test_stop_string_is_cut_in_both_ways_of_answering() -> None:
    body = {"prompt": "a", "max_tokens": 50, "stop": [", a"]}
    async with serving(say(REPLY)) as service:
        _, answer = await service.post("/v1/completions", body)
        events = await events_of(service, "/v1/completions", {**body, "stream": True})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello hello", "stop", ", a")
    assert "".join(event["choices"][0]["text"] for event in events) == "hello hello"
    assert events[-1]["choices"][0]["stop_reason"] == ", a"


def words(*pieces: str) -> FakeRouterClient:
    """Makes a router that answers with these pieces of a SentencePiece vocabulary."""
    tokens = tuple(map(PIECES.index, pieces))
    matchers = make_stop_matcher(sentencepiece_tokenizer())
    info = replace(INFO, vocab_size=sentencepiece_tokenizer().vocab_size)
    return FakeRouterClient(reply=lambda _: tokens, info=info, stop_matcher_factory=matchers)


async def test_space_between_prompt_and_output_of_sentencepiece() -> None:
    body = {"prompt": "My name is", "max_tokens": 2, "echo": True}
    async with serving(words("▁John", "."), tokenizer=sentencepiece_tokenizer()) as service:
        _, whole = await service.post("/v1/completions", body)
        _, alone = await service.post("/v1/completions", {**body, "echo": False})
        events = await events_of(service, "/v1/completions", {**body, "stream": True})
        _, stopped = await service.post("/v1/completions", {**body, "echo": False, "stop": " John"})
    assert whole["choices"][0]["text"] == "My name is John."
    assert alone["choices"][0]["text"] == " John."
    assert [event["choices"][0]["text"] for event in events] == ["My name is", " John", "."]
    (choice,) = stopped["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("", " John")
    assert stopped["usage"]["completion_tokens"] == 1


async def test_stop_token_is_no_text_but_counts() -> None:
    (comma,) = TOKENIZER.encode(",")
    body = {"prompt": "a", "max_tokens": 50, "stop_token_ids": [comma]}
    async with serving(say(REPLY)) as service:
        _, answer = await service.post("/v1/completions", body)
    assert answer["choices"][0]["text"] == "hello hello"
    assert answer["choices"][0]["stop_reason"] == comma
    assert answer["usage"]["completion_tokens"] == len(TOKENIZER.encode("hello hello,"))


async def test_ignore_eos_goes_on_after_it() -> None:
    async with serving(say("a", then=(EOS, 5, 5))) as service:
        _, answer = await service.post("/v1/completions", {"prompt": "a", "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_cached_tokens_are_those_that_no_choice_of_a_prompt_has_computed() -> None:
    found = {"abcd": [0, 3], "xyz": [2, 1]}

    def cached(request: GenerateRequest) -> int:
        return found[TOKENIZER.decode(request.prompt_token_ids)].pop(0)

    body = {"prompt": list(found), "n": 2, "max_tokens": 1}
    async with serving(FakeRouterClient(info=INFO, cached=cached)) as service:
        _, answer = await service.post("/v1/completions", body)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        found.update({"abcd": [4, 3], "xyz": [1, 2]})
        streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events = await events_of(service, "/v1/completions", streaming)
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("repeats", [False, True])
async def test_usage_comes_with_every_event_where_it_is_asked_for(repeats: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": repeats}
    body = {"messages": USER, "n": 2, "max_tokens": 2, "stream": True, "stream_options": options}
    async with serving(say("ab")) as service:
        events = await events_of(service, "/v1/chat/completions", body)
    *before, last = [event["usage"] for event in events]
    num_prompt = last["prompt_tokens"]
    counts = [usage and (usage["completion_tokens"], usage["total_tokens"] - num_prompt) for usage in before]
    # Two openings, then a token of one of the two choices each.
    assert counts == ([(0, 0), (0, 0), (1, 1), (2, 2), (3, 3), (4, 4)] if repeats else [None] * 6)
    assert last["completion_tokens"] == 4


async def test_several_prompts_and_choices_keep_their_order_and_index() -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "echo": True, "seed": 7}
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        _, answer = await service.post("/v1/completions", body)
        events = await events_of(service, "/v1/completions", {**body, "stream": True})
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "aaaa"), (1, "aaaa"), (2, "bbbb"), (3, "bbbb"),
    ]  # fmt: skip
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    texts = dict.fromkeys(range(4), "")
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "aaaa", 1: "aaaa", 2: "bbbb", 3: "bbbb"}
    seeds = [request.sampling.seed for request in router.requests[:4]]
    assert seeds[0] == seeds[2] == 7
    assert seeds[1] == seeds[3] != 7


async def test_chat_stream_opens_every_choice_with_its_role() -> None:
    body = {"messages": USER, "n": 2, "max_tokens": 2, "stream": True}
    async with serving(FakeRouterClient(info=INFO)) as service:
        events = await events_of(service, "/v1/chat/completions", body)
    roles = [event["choices"][0]["delta"].get("role") for event in events]
    assert roles[:2] == ["assistant", "assistant"]
    assert set(roles[2:]) == {None}
    finishes = [event["choices"][0]["finish_reason"] for event in events]
    assert finishes.count("length") == 2


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("def", [(259,)]),
        (["def", "a"], [(259,), TOKENIZER.encode("a")]),
        ([5, 6], [(5, 6)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
async def test_four_forms_of_prompt(prompt: Any, expected: list[tuple[int, ...]]) -> None:
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        status, _ = await service.post("/v1/completions", {"prompt": prompt})
    assert status == 200
    assert [request.prompt_token_ids for request in router.requests] == expected


async def test_speculation_metrics_have_vllms_names() -> None:
    body = {"prompt": "a", "n": 2, "return_speculation_metrics": True}
    async with serving(FakeRouterClient(info=INFO)) as service:
        _, answer = await service.post("/v1/completions", body)
        events = await events_of(service, "/v1/completions", {**body, "stream": True})
    # Twice the fake's SpeculationStats(2, 8, 4, (0, 1, 0, 1)).
    metrics = answer["metrics"]
    assert metrics == {
        "speculative_decoding": {
            "mean_acceptance_length": 3.0,
            "draft_acceptance_rate": 0.5,
            "num_spec_steps": 4,
            "num_accepted_draft_tokens": 8,
            "num_draft_tokens": 16,
            "acceptance_histogram": [0, 2, 0, 2],
        }
    }
    assert events[-1]["metrics"] == metrics
    assert events[-1]["choices"] == []


async def test_request_carries_every_sampling_field_to_the_router() -> None:
    body = {
        "prompt": "a", "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125,
        "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2,
        "logit_bias": {"5": -100, "6": 1.5},
        "seed": -1,
        "stop": "x", "stop_token_ids": [9], "max_tokens": 5, "min_tokens": 2, "logprobs": 0,
        "speculation": {
            "enabled": False, "num_speculative_tokens": 3, "verification": "rejection",
            "draft": "suffix", "tenant": "a",
        },
    }  # fmt: skip
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service, service.http.post("/v1/completions", json=body) as response:
        assert response.status == 200
    (request,) = router.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.5,
        -1,
        2,
    )
    assert sampling.logit_bias == ((5, -100.0), (6, 1.5))
    assert sampling.seed == (1 << 64) - 1
    assert sampling.stop_token_ids == (EOS, 9)
    assert (sampling.min_tokens, sampling.num_prompt_tokens, sampling.num_logprobs) == (2, 1, 0)
    assert sampling.verification is Verification.REJECTION
    assert (request.max_tokens, request.stop, request.eos_token_ids) == (5, ("x",), (EOS,))
    assert request.speculation == SpeculationParams(False, 3, DraftKind.SUFFIX, "a")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_client_that_leaves_aborts_every_choice(is_stream: bool) -> None:
    router = endless()
    body = {"prompt": ["a", "b"], "stream": is_stream}
    async with serving(router) as service:
        with pytest.raises(TimeoutError):
            timeout = aiohttp.ClientTimeout(total=0.3)
            await service.http.post("/v1/completions", json=body, timeout=timeout)
        await wait_until(lambda: len(router.aborted_request_ids) == 2)
    assert sorted(router.aborted_request_ids) == sorted(request.request_id for request in router.requests)


class FailingFirst(FakeRouterClient):
    """A router whose first request fails once the second waits for ever."""

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        if request.request_id.endswith("-0"):
            await wait_until(lambda: len(self.requests) == 1)
            raise EngineLostError("the target was lost")
        return await super().complete(request)


async def test_failure_of_one_choice_aborts_the_others() -> None:
    router = FailingFirst(info=INFO, clock=RealClock(), chunk_interval_s=1000.0)
    async with serving(router) as service:
        status, _ = await service.post("/v1/completions", {"prompt": "a", "n": 2})
        assert status == 503
        assert len(router.aborted_request_ids) == 1


class Stuck(FakeRouterClient):
    """A router that sends one chunk, then nothing; records when the stream is closed."""

    def __init__(self) -> None:
        super().__init__(info=INFO)
        self.is_closed = asyncio.Event()

    async def stream(self, request: GenerateRequest) -> Any:
        try:
            yield OutputChunk(request.request_id, TOKENIZER.encode("a"))
            await asyncio.sleep(1000)
        finally:
            self.is_closed.set()


async def test_client_that_leaves_in_the_middle_of_a_stream_closes_it() -> None:
    router = Stuck()
    async with serving(router) as service:
        async with service.http.post("/v1/completions", json={"prompt": "a", "stream": True}) as response:
            assert (await response.content.readline()).startswith(b"data: ")
            assert not router.is_closed.is_set()
        async with asyncio.timeout(10):
            await router.is_closed.wait()


async def test_silent_router_ends_in_503_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specray.serving.http.openai_api.DEADLINE_MARGIN_S", 0.05)
    config = parse_config({"served_model_name": MODEL, "router": {"request_timeout_s": 0.05}})
    router = endless()
    async with serving(router, config=config) as service:
        for is_stream in (False, True):
            async with service.http.post(
                "/v1/completions", json={"prompt": "a", "stream": is_stream}
            ) as response:
                assert response.status == 503
                assert "no answer within 0.1 s" in (await response.json())["error"]["message"]
    assert len(router.aborted_request_ids) == 2


async def test_health_ready_metrics_and_version() -> None:
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        for path, status in [("/health", 200), ("/ready", 200), ("/version", 200)]:
            async with service.http.get(path) as response:
                assert response.status == status
            async with service.http.head(path) as response:
                assert (response.status, await response.read()) == (
                    status if path != "/version" else 405,
                    b"",
                )
        router.is_ready = False
        assert (await service.http.head("/ready")).status == 503
        async with service.http.get("/ready") as response:
            assert response.status == 503
            assert (await response.json())["error"]["message"] == "the fake target is lost"
        async with service.http.get("/health") as response:
            assert response.status == 200
        async with service.http.get("/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert "specray_fake_total 1.0" in await response.text()


async def test_response_id_is_a_header_too() -> None:
    async with (
        serving(FakeRouterClient(info=INFO)) as service,
        service.http.post("/v1/completions", json={"prompt": "a"}) as response,
    ):
        assert response.headers["X-Request-Id"] == (await response.json())["id"]
