"""Requests as unmodified lm_eval sends them, answered as when it read its scores, which follow from them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.serving.http.chat.models import saying
from tests.unit.serving.http.clients.record_lm_eval import RECORDED
from tests.unit.serving.http.clients.scenarios import stable, tokenizer
from tests.unit.serving.http.service import serving

RECORDING: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
SCORED = [exchange for exchange in RECORDING["exchanges"] if exchange["path"] == "/v1/completions"]


def test_recording_asks_for_the_tokenizer_and_for_scores_of_token_ids() -> None:
    paths = {(exchange["method"], exchange["path"]) for exchange in RECORDING["exchanges"]}
    assert paths == {("GET", "/tokenizer_info"), ("POST", "/tokenize"), ("POST", "/v1/completions")}
    assert {exchange["status"] for exchange in RECORDING["exchanges"]} == {200}
    for exchange in SCORED:
        body = {name: value for name, value in exchange["body"].items() if name not in ("prompt", "model")}
        assert body == {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    assert [len(exchange["body"]["prompt"]) for exchange in SCORED] == [2, 1, 1]


async def test_recorded_requests_are_answered_as_they_were() -> None:
    async with serving(saying(tokenizer(), "Yes.")) as service:
        for exchange in RECORDING["exchanges"]:
            async with service.http.request(
                exchange["method"], exchange["path"], json=exchange["body"]
            ) as response:
                assert response.status == exchange["status"]
                assert stable(await response.json()) == exchange["answer"]


@pytest.mark.parametrize(
    ("place", "choice", "context_len", "score"),
    [
        (0, 0, 5, RECORDING["scores"][1]),
        (0, 1, 1, RECORDING["scores"][2]),
        (1, 0, 5, RECORDING["scores"][0]),
        (2, 0, 1, [RECORDING["rolling"][0], False]),
    ],
)
def test_scores_are_sums_over_the_continuation(
    place: int, choice: int, context_len: int, score: list[Any]
) -> None:
    body, answer = SCORED[place]["body"], SCORED[place]["answer"]["choices"][choice]
    continuation = body["prompt"][choice][context_len:]
    logprobs = answer["logprobs"]
    # The router of the recording gives a token the hundredth part of its id, and token 0 a better one.
    assert logprobs["token_logprobs"][context_len:-1] == [-token / 100 for token in continuation]
    assert all(max(top.values()) == -0.005 for top in logprobs["top_logprobs"][context_len:-1])
    assert [round(sum(logprobs["token_logprobs"][context_len:-1]), 9), False] == [
        round(score[0], 9),
        score[1],
    ]
