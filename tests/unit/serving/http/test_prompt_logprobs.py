"""Logprobs of prompts over HTTP, as evaluation harnesses read them: echo, prompt_logprobs, max_tokens 0."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.serving.http.service import REPLY, TOKENIZER, events_of, say, serving

PROMPT = "hello, a é"
IDS = list(TOKENIZER.encode(PROMPT))
COMPLETIONS = "/v1/completions"


async def answered(body: dict[str, Any]) -> dict[str, Any]:
    async with serving(say(REPLY)) as service:
        status, answer = await service.post(COMPLETIONS, body)
    assert status == 200, answer
    return dict(answer)


@pytest.mark.parametrize("prompt", [PROMPT, IDS, [IDS]])
async def test_echo_has_the_prompts_logprobs_before_the_outputs_and_none_for_its_first_token(
    prompt: Any,
) -> None:
    answer = await answered({"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1})
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    [first_output] = TOKENIZER.encode(REPLY)[:1]
    assert logprobs["token_logprobs"] == [None, *(-token / 100 for token in IDS[1:]), -0.5]
    assert logprobs["tokens"] == [TOKENIZER.token_text(token) for token in (*IDS, first_output)]
    likeliest = TOKENIZER.token_text(0)
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {likeliest: -0.005, TOKENIZER.token_text(IDS[1]): -IDS[1] / 100}
    assert choice["text"].startswith(PROMPT)
    # What follows each offset begins with the token there.
    for offset, token in zip(logprobs["text_offset"], (*IDS, first_output), strict=True):
        text = TOKENIZER.token_text(token)
        assert text.startswith("bytes:") or choice["text"][offset:].startswith(text)


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_max_tokens_0_answers_the_prompt_alone(logprobs: int | None) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": logprobs}
    answer = await answered(body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (PROMPT, "length", None)
    assert answer["usage"]["completion_tokens"] == 0
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["token_logprobs"] == [None, *(-token / 100 for token in IDS[1:])]
        assert choice["logprobs"]["top_logprobs"][1:] == [
            {TOKENIZER.token_text(token): -token / 100} for token in IDS[1:]
        ]


async def test_max_tokens_0_streams_the_prompt_and_an_end() -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "stream": True}
    async with serving(say(REPLY)) as service:
        events = await events_of(service, COMPLETIONS, body)
    choices = [event["choices"][0] for event in events]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        (PROMPT, None),
        ("", "length"),
    ]


async def test_prompts_of_a_batch_have_their_own() -> None:
    prompts = [IDS, IDS[:2], IDS[1:3]]
    answer = await answered({"prompt": prompts, "echo": True, "logprobs": 0, "max_tokens": 0, "n": 1})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [
        [None, *(-token / 100 for token in prompt[1:])] for prompt in prompts
    ]


async def test_prompt_of_one_token_has_a_null_alone() -> None:
    answer = await answered({"prompt": IDS[:1], "echo": True, "logprobs": 1, "max_tokens": 1})
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]


async def test_prompt_logprobs_are_listed_by_token_id_as_in_vllm() -> None:
    answer = await answered({"prompt": IDS, "prompt_logprobs": 1, "max_tokens": 1})
    [choice] = answer["choices"]
    listed = choice["prompt_logprobs"]
    assert listed[0] is None and len(listed) == len(IDS)
    assert listed[1] == {
        "0": {"logprob": -0.005, "rank": 1, "decoded_token": TOKENIZER.token_text(0)},
        str(IDS[1]): {
            "logprob": -IDS[1] / 100,
            "rank": None,
            "decoded_token": TOKENIZER.token_text(IDS[1]),
        },
    }
    assert choice["logprobs"] is None
    assert not choice["text"].startswith(PROMPT)


async def test_without_echo_logprobs_are_the_outputs_alone() -> None:
    answer = await answered({"prompt": IDS, "logprobs": 1, "max_tokens": 1})
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]
    assert "prompt_logprobs" not in answer["choices"][0]
