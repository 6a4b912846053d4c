"""Tests of request bodies as the router's requests: defaults, seeds, and the limits of float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.request_options import Range
from specray.requests import GenerateRequest, SpeculationParams
from specray.serving.calls.generate_requests import mix_seed, to_generate_requests
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.schemas import CompletionRequest, parse_request
from specray.serving.validation import (
    MAX_CHOICES,
    RANGES,
    GenerationOptions,
    Limits,
)
from specray.types import DraftKind, SamplingParams, Verification
from tests.unit.serving.http.service import TOKENIZER
from tests.unit.tokenization.tiny_tokenizer import EOS

LIMITS = Limits("tiny", vocab_size=264, max_model_len=64, eos_token_ids=(EOS,))


def request_of(**fields: Any) -> GenerateRequest:
    """Returns the first request of a completions body with the prompt (5, 6)."""
    body = parse_request(CompletionRequest, {"prompt": [5, 6], **fields})
    return to_generate_requests(
        [(5, 6)], body.options(), limits=LIMITS, request_id="id", draw_seed=lambda: 99
    )[0]


def test_completion_defaults_are_openais() -> None:
    assert request_of() == GenerateRequest(
        request_id="id-0-0",
        prompt_token_ids=(5, 6),
        sampling=SamplingParams(
            temperature=1.0, top_p=1.0, seed=99, stop_token_ids=(EOS,), num_prompt_tokens=2
        ),
        max_tokens=16,
        eos_token_ids=(EOS,),
        speculation=SpeculationParams(enabled=True, num_speculative_tokens=None),
    )


@pytest.mark.parametrize(("seed", "seeds"), [(None, [100, 100, 101, 101]), (7, [7, 7, 7, 7])])
def test_each_prompt_has_a_seed_of_its_own_unless_the_call_has_one(
    seed: int | None, seeds: list[int]
) -> None:
    """Equal prompts of one call are asked for because their outputs are to differ."""
    drawn = iter([100, 101])
    requests = to_generate_requests(
        [(5, 6), (5, 6)],
        GenerationOptions(n=2, seed=seed),
        limits=LIMITS,
        request_id="id",
        draw_seed=lambda: next(drawn),
    )
    choices = [mix_seed(number, choice) for number, choice in zip(seeds, (0, 1, 0, 1), strict=True)]
    assert [request.sampling.seed for request in requests] == choices


def test_default_max_tokens_gives_way_to_a_long_prompt() -> None:
    options = GenerationOptions(default_max_tokens=16)
    (request,) = to_generate_requests([(5,) * 60], options, limits=LIMITS, request_id="id")
    assert request.max_tokens == 4


def test_longest_prompt_leaves_room_for_one_token() -> None:
    (request,) = to_generate_requests([(5,) * 63], GenerationOptions(), limits=LIMITS, request_id="id")
    assert request.max_tokens == 1
    with pytest.raises(InvalidRequestError, match=r"64; allowed: 1\.\.63"):
        to_generate_requests([(5,) * 64], GenerationOptions(), limits=LIMITS, request_id="id")


def test_seeds_of_choices_are_the_seed_itself_and_then_splitmix64() -> None:
    assert mix_seed(7, 0) == 7
    assert mix_seed(-1, 0) == 2**64 - 1
    # The published first outputs of splitmix64 from state 0 (Vigna's splitmix64.c).
    assert [mix_seed(0, choice) for choice in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert mix_seed(2**64 - 1, 1) < 2**64


def test_seed_is_drawn_once_and_differs_between_calls() -> None:
    options = GenerationOptions(n=3)
    seeds = [
        [
            request.sampling.seed
            for request in to_generate_requests([(5,)], options, limits=LIMITS, request_id="x")
        ]
        for _ in range(2)
    ]
    assert len({*seeds[0], *seeds[1]}) == 6


def test_values_that_float32_cannot_hold_become_their_limits() -> None:
    assert request_of(temperature=1e-30).sampling.temperature == 0.0
    assert request_of(temperature=1e-5).sampling.temperature == 1e-5
    assert request_of(top_p=1e-300).sampling.top_p == 1e-6


def test_top_k_of_minus_one_is_none_as_in_vllm() -> None:
    assert [request_of(top_k=top_k).sampling.top_k for top_k in (-1, 0, 1)] == [0, 0, 1]


def test_ignore_eos_leaves_the_users_stop_tokens() -> None:
    request = request_of(ignore_eos=True, stop_token_ids=[9, 9, EOS])
    assert request.sampling.stop_token_ids == (EOS, 9)
    # The user asked for it by its id, so it is a stop token like another.
    assert request.eos_token_ids == ()


def test_service_decides_the_verification_that_a_request_leaves_open() -> None:
    limits = Limits("tiny", 264, 64, (), verification=Verification.REJECTION)
    (request,) = to_generate_requests([(5,)], GenerationOptions(), limits=limits, request_id="id")
    assert request.sampling.verification is Verification.REJECTION


def test_number_of_choices_is_bounded_over_all_prompts() -> None:
    with pytest.raises(InvalidRequestError, match=f"allowed: 1..{MAX_CHOICES}") as caught:
        to_generate_requests([(5,)] * 9, GenerationOptions(n=128), limits=LIMITS, request_id="id")
    assert caught.value.field == "n"


@pytest.mark.parametrize("name", sorted(RANGES))
def test_both_ends_of_every_range_are_allowed_and_nothing_beyond(name: str) -> None:
    limits = RANGES[name]
    assert limits.contains(limits.high)
    assert limits.contains(limits.low) is not limits.is_low_open
    assert not limits.contains(float("nan"))
    assert not limits.contains(float("inf"))
    assert not limits.contains(-float("inf"))


def test_range_is_checked_in_integers_where_floats_are_too_coarse() -> None:
    assert not Range(0, 2**64 - 1).contains(2**64)


def test_integers_are_numbers_but_numbers_are_no_integers() -> None:
    assert request_of(temperature=1).sampling.temperature == 1.0
    with pytest.raises(InvalidRequestError, match=r"max_tokens is 5\.0"):
        request_of(max_tokens=5.0)


def test_chat_parts_of_text_are_joined_and_developers_are_system() -> None:
    body = parse_request(
        ChatCompletionRequest,
        {
            "messages": [
                {"role": "developer", "content": "be brief", "name": None},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ]
        },
    )
    assert [(message.role, message.content) for message in body.chat()] == [
        ("system", "be brief"),
        ("user", "ab"),
    ]


def test_chat_takes_either_name_of_max_tokens() -> None:
    messages = [{"role": "user", "content": "a"}]
    for fields in (
        {"max_tokens": 5},
        {"max_completion_tokens": 5},
        {"max_tokens": 5, "max_completion_tokens": 5},
    ):
        body = parse_request(ChatCompletionRequest, {"messages": messages, **fields})
        assert body.options().max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_chat_logprobs(fields: dict[str, Any], expected: int | None) -> None:
    body = parse_request(ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}], **fields})
    assert body.options().logprobs == expected


def test_error_shows_no_more_than_a_little_of_a_long_value() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_of(temperature="x" * 10_000)
    assert len(str(caught.value)) < 200


def test_tokenizer_and_limits_of_these_tests_agree() -> None:
    assert TOKENIZER.vocab_size == LIMITS.vocab_size


def test_draft_model_may_be_asked_for_only_where_there_is_one() -> None:
    without = replace(LIMITS, has_draft_model=False)
    options = GenerationOptions(draft=DraftKind.MODEL, names={"draft": "speculation.draft"})
    (request,) = to_generate_requests([(5,)], options, limits=LIMITS, request_id="id")
    assert request.speculation.draft is DraftKind.MODEL
    with pytest.raises(InvalidRequestError, match="'model'; allowed: ngram, suffix") as caught:
        to_generate_requests([(5,)], options, limits=without, request_id="id")
    assert caught.value.field == "speculation.draft"
    for kind in (DraftKind.NGRAM, DraftKind.SUFFIX):
        options = GenerationOptions(draft=kind, tenant="a")
        (request,) = to_generate_requests([(5,)], options, limits=without, request_id="id")
        assert (request.speculation.draft, request.speculation.tenant) == (kind, "a")
