"""Fields beyond OpenAI's: what they change in an answer, and which of other servers' are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specray.config import parse_config
from specray.fakes import FakeRouterClient
from tests.unit.serving.http.service import (
    INFO,
    MAX_MODEL_LEN,
    MODEL,
    TEXT,
    TOKENIZER,
    events_of,
    say,
    serving,
)
from tests.unit.tokenization.tiny_tokenizer import BOS, EOS

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
HELLO = list(TOKENIZER.encode("hello"))


async def answered(body: dict[str, Any], client: FakeRouterClient) -> tuple[str, str, int]:
    """Text, finish reason and number of output tokens, which are the same in both ways of answering."""
    async with serving(client) as service:
        status, answer = await service.post("/v1/completions", body)
        assert status == 200, answer
        events = await events_of(service, "/v1/completions", {**body, "stream": True})
    (choice,) = answer["choices"]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    return choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "hello"),
        ({"skip_special_tokens": False}, "hello<s>"),
        ({"include_stop_str_in_output": True}, "hello"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "hello<s></s>"),
    ],
)
async def test_special_tokens_are_text_on_request(fields: dict[str, Any], text: str) -> None:
    body = {"prompt": "a", "max_tokens": 50, **fields}
    assert await answered(body, say("hello", then=(BOS, EOS, 5))) == (text, "stop", len(HELLO) + 2)


@pytest.mark.parametrize(("is_included", "text"), [(None, "hello"), (False, "hello"), (True, "hello<s>")])
async def test_stop_string_of_a_special_token_ends_the_output(is_included: bool | None, text: str) -> None:
    body = {"prompt": "a", "max_tokens": 50, "stop": ["<s>"], "include_stop_str_in_output": is_included}
    assert await answered(body, say("hello", then=(BOS, 5, 5))) == (text, "stop", len(HELLO) + 1)


async def test_token_ids_of_a_whole_answer() -> None:
    body = {"prompt": [[7], [5, 6]], "n": 2, "max_tokens": 3, "return_token_ids": True}
    async with serving(FakeRouterClient(info=INFO)) as service:
        _, answer = await service.post("/v1/completions", body)
        _, chat = await service.post("/v1/chat/completions", {**CHAT, "return_token_ids": True})
        _, tokens = await service.post("/tokenize", {"messages": CHAT["messages"]})
    assert [(choice["prompt_token_ids"], choice["token_ids"]) for choice in answer["choices"]] == [
        *[([7], [7] * 3)] * 2,
        *[([5, 6], [5, 6, 5])] * 2,
    ]
    assert chat["prompt_token_ids"] == tokens["tokens"]
    assert chat["choices"][0]["token_ids"] == tokens["tokens"][:4]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_token_ids_of_a_stream_add_up_and_its_prompt_comes_first(path: str) -> None:
    body = {**(TEXT if path == "/v1/completions" else CHAT), "max_tokens": 50, "n": 2}
    # The last character has two tokens, of which the first completes no text: its id comes with the next.
    output = [*TOKENIZER.encode("hé"), EOS]
    async with serving(say("hé", then=(EOS,))) as service:
        plain = await events_of(service, path, {**body, "stream": True})
        events = await events_of(service, path, {**body, "stream": True, "return_token_ids": True})
    assert len(events) == len(plain)
    assert "token_ids" not in json.dumps(plain)
    ids: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        (choice,) = event["choices"]
        ids[choice["index"]] += choice["token_ids"]
    assert ids == {0: output, 1: output}
    prompts = [
        event.get("prompt_token_ids") or event["choices"][0].get("prompt_token_ids") for event in events
    ]
    is_chat = path == "/v1/chat/completions"
    assert [prompt is not None for prompt in prompts].count(True) == (1 if is_chat else 2)
    assert prompts[0] is not None


async def test_prompts_are_cut_to_their_end() -> None:
    router = FakeRouterClient(info=INFO)
    long = list(range(2, 102))
    async with serving(router) as service:
        body = {"prompt": long, "max_tokens": 4, "truncate_prompt_tokens": 3, "echo": True}
        _, answer = await service.post("/v1/completions", body)
        await service.post("/v1/completions", {**body, "truncate_prompt_tokens": -1})
        await service.post("/v1/chat/completions", {**CHAT, "truncate_prompt_tokens": 2})
        _, tokens = await service.post("/tokenize", {"messages": CHAT["messages"]})
    assert [list(request.prompt_token_ids) for request in router.requests] == [
        long[-3:],
        long[-(MAX_MODEL_LEN - 4) :],
        tokens["tokens"][-2:],
    ]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["text"].startswith(TOKENIZER.decode(long[-3:]))


async def test_max_tokens_is_a_bound_that_is_cut_to_what_is_left() -> None:
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        for max_tokens in (54, 55, 4096, 2**31 - 1):
            body = {"prompt": [5] * 10, "max_tokens": max_tokens}
            status, answer = await service.post("/v1/completions", body)
            assert status == 200
            assert answer["usage"]["completion_tokens"] == MAX_MODEL_LEN - 10
            assert answer["choices"][0]["finish_reason"] == "length"
        status, _ = await service.post("/v1/chat/completions", {**CHAT, "max_completion_tokens": 4096})
        assert status == 400  # Both names, with different values.
        chat = {"messages": CHAT["messages"], "max_completion_tokens": 4096}
        assert (await service.post("/v1/chat/completions", chat))[0] == 200
    assert {request.max_tokens for request in router.requests[:4]} == {54}


INERT: dict[str, Any] = {
    "skip_special_tokens": True, "add_generation_prompt": True, "continue_final_message": False,
    "include_stop_str_in_output": False, "spaces_between_special_tokens": True, "length_penalty": 1.0,
    "chat_template_kwargs": {}, "cache_prompt": True, "echo": False, "early_stopping": False,
    "use_beam_search": False, "best_of": 1, "tools": [], "repeat_penalty": 1.0, "typical_p": 1, "tfs_z": 1.0,
    "mirostat": 0, "mirostat_tau": 5.0, "xtc_probability": 0.0, "dry_multiplier": 0.0, "n_probs": 0,
    "id_slot": -1, "request_id": "abc", "stop": ["a"] * 64, "bad_words": [], "truncate_prompt_tokens": None,
}  # fmt: skip


async def test_fields_of_other_servers_are_accepted_where_they_ask_for_nothing() -> None:
    async with serving(FakeRouterClient(info=INFO)) as service:
        refused = {}
        for name, value in INERT.items():
            status, answer = await service.post("/v1/chat/completions", {**CHAT, name: value})
            if status != 200:
                refused[name] = answer
    assert refused == {}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("length_penalty", 2.0, "absent or 1"),
        ("length_penalty", True, "absent or 1"),
        ("early_stopping", 0, "absent or false"),
        ("repeat_penalty", 1.1, "absent or 1"),
        ("spaces_between_special_tokens", False, "absent or true"),
        ("mirostat", 2, "absent or 0"),
    ],
)
async def test_fields_of_other_servers_are_refused_where_they_ask_for_something(
    name: str, value: Any, allowed: str
) -> None:
    async with serving(FakeRouterClient(info=INFO)) as service:
        status, answer = await service.post("/v1/chat/completions", {**CHAT, name: value})
    assert (status, answer["error"]["param"]) == (400, name)
    expected = f"{name} is {value!r}, which this service does not support; allowed: {allowed}"
    assert answer["error"]["message"] == expected


async def test_unknown_fields_are_ignored_where_the_service_is_told_so() -> None:
    config = parse_config({"served_model_name": MODEL, "http": {"unknown_fields": "ignore"}})
    body = {
        **CHAT,
        "temprature": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "new": 1},
        "speculation": {"enabled": False, "k": 3},
        "guided_regex": "a+",
    }
    router = FakeRouterClient(info=INFO)
    async with serving(router, config=config) as service:
        events = await events_of(service, "/v1/chat/completions", body)
        status, answer = await service.post("/v1/chat/completions", {**CHAT, "length_penalty": 2})
        for body_of_tokens in ({"prompt": "a", "new": 1}, {"messages": CHAT["messages"], "new": 1}):
            assert (await service.post("/tokenize", body_of_tokens))[0] == 200
    assert events[-1]["usage"]["completion_tokens"] == 4
    (request,) = router.requests
    assert not request.speculation.enabled
    assert request.sampling.grammar is not None
    # What is known and not supported would change the output.
    assert (status, answer["error"]["param"]) == (400, "length_penalty")
