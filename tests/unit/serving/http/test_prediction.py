"""Predicted outputs over HTTP: OpenAI's field and its counts in usage, over a router and fakes behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from specray.fakes import FakeTarget, LocalVerifier
from specray.fakes.engines import fake_info
from specray.router import Router
from tests.unit.serving.http.service import (
    MAX_MODEL_LEN,
    MODEL,
    TEXT,
    TOKENIZER,
    RealClock,
    Service,
    events_of,
    say,
    serving,
)
from tests.unit.tokenization.tiny_tokenizer import EOS

OUTPUT = "def hello(a, b):\n    hello b\n"
OUTPUT_IDS = TOKENIZER.encode(OUTPUT)
EDITED = OUTPUT.replace("a, b", "b")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


@dataclass(frozen=True, slots=True)
class Scripted:
    """A model that writes OUTPUT behind the first prompt that it sees."""

    num_prompt_tokens: int
    vocab_size: int = TOKENIZER.vocab_size

    def next_token(self, tokens: Sequence[int], seed: int) -> int:
        return (*OUTPUT_IDS, EOS)[min(len(tokens) - self.num_prompt_tokens, len(OUTPUT_IDS))]


@asynccontextmanager
async def served(num_prompt_tokens: int = 1, **info: int) -> AsyncIterator[Service]:
    model: Any = Scripted(num_prompt_tokens)
    limits = {"vocab_size": TOKENIZER.vocab_size, "max_model_len": MAX_MODEL_LEN, **info}
    target = FakeTarget(model, info=fake_info("target", **limits))
    clock = RealClock()
    router = Router(LocalVerifier(target, clock), None, model=MODEL, clock=clock)
    await router.start()
    try:
        async with serving(router) as service:
            yield service
    finally:
        await router.stop()


def content(text: str) -> dict[str, Any]:
    return {"type": "content", "content": text}


@pytest.mark.parametrize(
    ("prediction", "accepted", "rejected"),
    [
        (content(OUTPUT), len(OUTPUT_IDS), 0),
        (
            {
                "type": "content",
                "content": [{"type": "text", "text": part} for part in (OUTPUT[:9], OUTPUT[9:])],
            },
            19,
            0,
        ),
        (content(EDITED), len(TOKENIZER.encode(EDITED)), 0),
        (content("zzzzzz"), 0, 6),
        (content(OUTPUT + "xyz"), len(OUTPUT_IDS), 3),
    ],
)
async def test_usage_tells_how_much_of_the_prediction_was_right(
    prediction: dict[str, Any], accepted: int, rejected: int
) -> None:
    body = {**TEXT, "max_tokens": 50, "prediction": prediction}
    async with served() as service:
        status, answer = await service.post("/v1/completions", body)
        assert status == 200, answer
        stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events = await events_of(service, "/v1/completions", stream)
    assert answer["choices"][0]["text"] == OUTPUT
    assert answer["usage"] == events[-1]["usage"]
    assert answer["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
    }
    # Rejected tokens are not charged.
    assert answer["usage"]["completion_tokens"] == len(OUTPUT_IDS) + 1


async def test_openai_client_predicts_the_outputs_of_a_chat() -> None:
    prompt = len(TOKENIZER.encode("[user]a[assistant]"))
    async with served(prompt) as service:
        url = f"{service.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "a"}],
                max_tokens=30,
                n=2,
                prediction={"type": "content", "content": OUTPUT},
                extra_body={"return_speculation_metrics": True},
            )
    assert [choice.message.content for choice in answer.choices] == [OUTPUT] * 2
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 2 * len(OUTPUT_IDS)
    assert details.rejected_prediction_tokens == 0
    metrics: Any = answer.model_extra
    assert metrics["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] >= 30


async def test_without_a_prediction_usage_has_no_details() -> None:
    async with served() as service:
        for prediction in ({}, {"prediction": None}, {"prediction": content("")}):
            _, answer = await service.post("/v1/completions", {**TEXT, "max_tokens": 50, **prediction})
            assert "completion_tokens_details" not in answer["usage"]


async def test_prediction_is_cut_to_the_context() -> None:
    router = say("a")
    async with serving(router) as service:
        status, _ = await service.post("/v1/completions", {**TEXT, "prediction": content("ab" * 5000)})
    assert status == 200
    (request,) = router.requests
    assert request.speculation.prediction == TOKENIZER.encode("ab" * 32)
    assert len(request.speculation.prediction) == MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("prediction", "param", "said"),
    [
        ("text", "prediction", 'prediction is \'text\'; allowed: {"type": "content", "content": a string or'),
        ({"type": "content"}, "prediction", "prediction is {'type': 'content'}; allowed: "),
        ({"type": "static", "content": "a"}, "prediction", "prediction is {'type': 'static', "),
        ({**content("a"), "more": 1}, "prediction", "prediction is "),
        (
            {"type": "content", "content": 5},
            "prediction.content",
            "prediction.content is 5; allowed: a string or",
        ),
        (
            {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "prediction.content[1]",
            "prediction.content[1] is {'type': 'image_url'}; allowed: {\"type\": \"text\", ",
        ),
        (
            {"type": "content", "content": [{"type": "text", "text": 1}]},
            "prediction.content[0]",
            "prediction.content[0] is",
        ),
        (
            {"type": "content", "content": ["a"]},
            "prediction.content[0]",
            "prediction.content[0] is 'a'; allowed: ",
        ),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_anything_else_is_refused_by_name(path: str, prediction: Any, param: str, said: str) -> None:
    body = {**(TEXT if path == "completions" else CHAT), "prediction": prediction}
    async with serving(say("a")) as service:
        status, answer = await service.post(f"/v1/{path}", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"].startswith(said)
