"""What an answer over plain HTTP holds, whole and as a stream: text, stops, usage, choices and fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specray.fakes import FakeRouterClient
from specray.requests import GenerateRequest, SpeculationParams
from specray.tokenization import make_stop_matcher
from specray.types import DraftKind
from tests.unit.serving.http.service import INFO, REPLY, TOKENIZER, events_of, say, serving
from tests.unit.tokenization.tiny_tokenizer import EOS, PIECES, sentencepiece_tokenizer

USER = [{"role": "user", "content": "hi"}]


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
    # Two openings, then a token of one of the two choices each, and the ends of both.
    assert len(counts) == 8
    if repeats:
        assert counts == sorted(counts) and set(counts) == {(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)}
    else:
        assert set(counts) == {None}
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


async def test_what_a_request_says_of_its_seed_its_ends_and_speculation_reaches_the_router() -> None:
    """Sampling: tests/unit/serving/test_sampling_fields.py."""
    speculation = {
        "enabled": False, "num_speculative_tokens": 3, "draft": "suffix", "tenant": "a",
    }  # fmt: skip
    body = {"prompt": "a", "seed": -1, "stop": "x", "stop_token_ids": [9], "speculation": speculation}
    router = FakeRouterClient(info=INFO)
    async with serving(router) as service:
        assert (await service.post("/v1/completions", body))[0] == 200
    (request,) = router.requests
    assert (request.sampling.seed, request.sampling.stop_token_ids) == ((1 << 64) - 1, (EOS, 9))
    assert (request.stop, request.eos_token_ids) == (("x",), (EOS,))
    assert request.speculation == SpeculationParams(False, 3, DraftKind.SUFFIX, "a")


async def test_response_id_is_a_header_too() -> None:
    async with (
        serving(FakeRouterClient(info=INFO)) as service,
        service.http.post("/v1/completions", json={"prompt": "a"}) as response,
    ):
        assert response.headers["X-Request-Id"] == (await response.json())["id"]
