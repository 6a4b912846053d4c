"""The unmodified openai client against our endpoints: answers, streams, logprobs and errors."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from specray.errors import DeadlineExceededError, EngineLostError, InvalidRequestError, OverloadedError
from specray.fakes import FakeRouterClient
from specray.requests import GenerateRequest, OutputChunk
from tests.unit.serving.http.service import INFO, MODEL, REPLY, TOKENIZER, Service, events_of, say, serving
from tests.unit.tokenization.tiny_tokenizer import EOS

NUM_REPLY = len(TOKENIZER.encode(REPLY))


def client_of(service: Service, **options: Any) -> openai.AsyncOpenAI:
    options = {"max_retries": 0, "timeout": 20, **options}
    return openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", **options)


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
