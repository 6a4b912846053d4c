"""Events that tell the rounds of a stream, for callers that ask for them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from specray.fakes import FakeRouterClient
from specray.requests import FinishReason, GenerateRequest, OutputChunk
from specray.round_reports import EngineStep, RoundReport
from specray.types import TokenLogprobs
from tests.unit.serving.http.service import INFO, TEXT, TOKENIZER, serving

HELLO, A = TOKENIZER.encode("hello"), TOKENIZER.encode("a")
STEP = EngineStep(1.23456, 2.0, 0.5)


def report(token_ids: tuple[int, ...], draft: tuple[int, ...], num_accepted: int, **more: Any) -> RoundReport:
    return RoundReport(
        **{
            "token_ids": token_ids,
            "draft_token_ids": draft,
            "num_accepted_tokens": num_accepted,
            "source": "model" if draft else "",
            "lookup": "",
            "overlap": "serial",
            "num_speculative_tokens": 2,
            "reason": "profitable",
            "verify": STEP,
            **more,
        }
    )


class Watched(FakeRouterClient):
    """A router whose only chunk has these rounds."""

    def __init__(self, *rounds: RoundReport) -> None:
        super().__init__(info=INFO)
        self.rounds = rounds

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        self.requests.append(request)
        token_ids = tuple(token for entry in self.rounds for token in entry.token_ids)
        logprobs = tuple(TokenLogprobs(token, -0.5, (), ()) for token in token_ids)
        has_logprobs = request.sampling.num_logprobs is not None
        chunk = OutputChunk(request.request_id, token_ids, logprobs if has_logprobs else ())
        yield replace(chunk, finish_reason=FinishReason.LENGTH, rounds=self.rounds)


async def events(router: Watched, **fields: Any) -> list[dict[str, Any]]:
    body = {**TEXT, "stream": True, "stream_options": {"include_speculation": True}, **fields}
    async with serving(router) as service, service.http.post("/v1/completions", json=body) as response:
        assert response.status == 200
        lines = (await response.text()).split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]


async def test_a_round_is_an_event_without_choices_before_its_text() -> None:
    told = await events(Watched(report((A[0], A[0]), (A[0], HELLO[0]), 1, draft_probs=(0.75, 0.25))))
    assert [len(event["choices"]) for event in told] == [0, 1]
    assert told[0]["object"] == "text_completion"
    assert told[0]["speculation"] == {
        "index": 0,
        "rounds": [
            {
                "tokens": [
                    {"id": A[0], "text": "a", "logprob": None, "kind": "accepted"},
                    {"id": A[0], "text": "a", "logprob": None, "kind": "recovered"},
                ],
                "draft": [
                    {"id": A[0], "text": "a", "probability": 0.75},
                    {"id": HELLO[0], "text": TOKENIZER.token_text(HELLO[0]), "probability": 0.25},
                ],
                "parents": None,
                "num_accepted_tokens": 1,
                "source": "model",
                "lookup": "",
                "overlap": "serial",
                "num_speculative_tokens": 2,
                "reason": "profitable",
                "verify": {"started_ms": 1.235, "ended_ms": 2.0, "forward_ms": 0.5},
                "drafting": [],
            }
        ],
    }


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (report((5,), (), 0), ["target"]),
        (report((5, 6, 7), (5, 6), 2), ["accepted", "accepted", "bonus"]),
        (report((5, 7), (5, 6), 1), ["accepted", "recovered"]),
        (report((7,), (5, 6), 0), ["recovered"]),
        (report((5,), (5, 6), 1), ["accepted"]),
        # A tree: 5 has the children 6 and 7; 8 is beside 5.
        (report((5, 7, 9), (5, 8, 6, 7), 2, draft_parents=(-1, -1, 0, 0)), ["accepted", "accepted", "bonus"]),
        (report((5, 9), (5, 8, 6, 7), 1, draft_parents=(-1, -1, 0, 0)), ["accepted", "recovered"]),
        (report((8, 9), (5, 8, 6, 7), 1, draft_parents=(-1, -1, 0, 0)), ["accepted", "bonus"]),
    ],
)
async def test_kind_of_each_token(given: RoundReport, kinds: list[str]) -> None:
    told = await events(Watched(given))
    (entry,) = told[0]["speculation"]["rounds"]
    assert [token["kind"] for token in entry["tokens"]] == kinds


async def test_the_targets_probability_comes_with_logprobs() -> None:
    told = await events(Watched(report(A, (), 0), report(A, (), 0)), logprobs=0)
    assert [token["logprob"] for entry in told[0]["speculation"]["rounds"] for token in entry["tokens"]] == [
        -0.5,
        -0.5,
    ]


async def test_router_is_asked_for_rounds_only_when_the_caller_asks() -> None:
    router = Watched(report(A, (), 0))
    await events(router)
    told = await events(router, stream_options={"include_usage": True})
    assert [asked.speculation.reports_rounds for asked in router.requests] == [True, False]
    assert all("speculation" not in event for event in told)


async def test_rounds_of_a_chat_are_events_of_chunks() -> None:
    router = Watched(report(A, (), 0))
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 4}
    body["stream_options"] = {"include_speculation": True}
    async with serving(router) as service, service.http.post("/v1/chat/completions", json=body) as response:
        text = await response.text()
    lines = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    (told,) = [event for event in lines if "speculation" in event]
    assert (told["object"], told["choices"]) == ("chat.completion.chunk", [])


async def test_rounds_of_an_output_that_is_not_asked_for_are_not_told() -> None:
    told = await events(Watched(report(A, (), 0)), echo=True, max_tokens=0)
    assert told[0]["choices"][0]["text"] == "a"
    assert all("speculation" not in event for event in told)


async def test_without_a_stream_there_is_nothing_to_ask_for() -> None:
    async with serving(Watched()) as service:
        body = {**TEXT, "stream_options": {"include_speculation": True}}
        status, answer = await service.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "stream_options")
