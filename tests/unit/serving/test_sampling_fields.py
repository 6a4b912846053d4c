"""Every field of SamplingParams survives the way from a caller to an engine, by HTTP and by gRPC.

The fields and their values are taken from the types, so that a new field is covered, or missed, by itself.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.request_options import OPTIONS, Range
from specray.requests import GenerateRequest
from specray.router.session.session import Session
from specray.rpc.codec.inference import decode_generate_request, encode_generate_request
from specray.rpc.codec.target import decode_verify_request, encode_verify_request
from specray.rpc.inference.types import GenerateParams
from specray.serving.calls.generate_requests import to_generate_requests
from specray.serving.calls.option_texts import with_bad_word_ids
from specray.serving.grpc.handler import generation_options
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.schemas import CompletionRequest, parse_request
from specray.serving.validation import GenerationOptions, Limits
from specray.types import SamplingParams, Verification

LIMITS = Limits(model_name="toy", vocab_size=64, max_model_len=512, eos_token_ids=(3,))
PROMPT = (5, 6, 7, 8)
# A grammar forbids min_tokens: its tests are http/test_structured_output.py and rpc/test_codec.py.
# The Ingress knows which digest an adapter's name stands for.
NAMES = [field.name for field in fields(SamplingParams) if field.name not in ("grammar", "adapter")]
DEFAULTS = {field.name: field.default for field in fields(SamplingParams) if field.name in NAMES}


def asked_value(name: str) -> float:
    """A value in range that is no default and the same in float32."""
    default, allowed = DEFAULTS[name], OPTIONS[name].allowed or Range(0, 9)
    values = (
        (int(allowed.high) // 2, 2, 1)
        if isinstance(default, int)
        else (0.5, 1.5, (allowed.low + allowed.high) / 2)
    )
    return next(value for value in values if allowed.contains(value) and value not in (default, 0))


NUMBERS = [name for name in NAMES if name in OPTIONS and type(DEFAULTS[name]) in (int, float)]
ASKED: dict[str, float] = {name: asked_value(name) for name in NUMBERS}
SPECIAL = {
    "logit_bias": ((4, -2.5), (9, 50.0)),
    "stop_token_ids": (3, 11),
    "num_prompt_tokens": len(PROMPT),
    "num_logprobs": 2,
    "num_prompt_logprobs": 3,
    "verification": Verification.REJECTION,
    "allowed_token_ids": (4, 9, 12),
    "bad_words": ((97, 98), (32, 97, 98)),
    "cache_salt": "pepper",
    "message_borders": (1, 3),
}
EXPECTED: dict[str, Any] = ASKED | SPECIAL


def http_options(schema: type[CompletionRequest] | type[ChatCompletionRequest]) -> GenerationOptions:
    body: dict[str, Any] = ASKED | {
        "logit_bias": {"4": -2.5, "9": 50.0},
        "stop_token_ids": [11],
        "speculation": {"verification": "rejection"},
        "max_tokens": 100,
        "prompt_logprobs": 3,
        "allowed_token_ids": [4, 9, 12],
        "bad_words": ["ab"],
        "cache_salt": "pepper",
    }
    if schema is CompletionRequest:
        body |= {"prompt": list(PROMPT), "logprobs": 2}
    else:
        body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    return parse_request(schema, body).options()


def grpc_options() -> GenerationOptions:
    asked: dict[str, Any] = dict(ASKED)
    params = GenerateParams(
        token_ids=PROMPT,
        logit_bias=SPECIAL["logit_bias"],
        stop_token_ids=(11,),
        logprobs=2,
        prompt_logprobs=3,
        verification=Verification.REJECTION,
        max_tokens=100,
        allowed_token_ids=SPECIAL["allowed_token_ids"],
        bad_words=("ab",),
        cache_salt="pepper",
        **asked,
    )
    return generation_options(decode_generate_request(encode_generate_request(params)))


class Letters:
    """The part of a tokenizer that bad words need: a character is a token."""

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        assert not add_special_tokens
        return tuple(map(ord, text))


def engine_sampling(options: GenerationOptions) -> SamplingParams | None:
    """What the target's engine is told with the first item of the request."""
    bad_word_ids = with_bad_word_ids(options, Letters()).bad_word_ids  # type: ignore[arg-type]
    # The prompts of a chat plan have borders.
    options = replace(options, bad_word_ids=bad_word_ids, message_tails=(3, 1, 4))
    [request] = to_generate_requests([PROMPT], options, limits=LIMITS, request_id="a")
    assert isinstance(request, GenerateRequest)
    item = Session(request, None, vocab_size=64).verify_item(1000)
    [received] = decode_verify_request(encode_verify_request([item], ())).items
    return received.sampling


def test_every_field_has_a_value_of_its_own() -> None:
    assert set(EXPECTED) == set(DEFAULTS)
    assert not [name for name in DEFAULTS if EXPECTED[name] == DEFAULTS[name]]


@pytest.mark.parametrize("api", ["completions", "chat", "grpc"])
def test_every_sampling_field_reaches_the_engine(api: str) -> None:
    match api:
        case "completions":
            options = http_options(CompletionRequest)
        case "chat":
            options = http_options(ChatCompletionRequest)
        case _:
            options = grpc_options()
    sampling = engine_sampling(options)
    assert sampling is not None
    assert {name: getattr(sampling, name) for name in NAMES} == EXPECTED


@pytest.mark.parametrize("name", NUMBERS)
def test_every_option_out_of_its_range_is_refused_by_its_name(name: str) -> None:
    allowed = OPTIONS[name].allowed
    highest = LIMITS.max_model_len - 1 if allowed is None else allowed.high
    beyond: dict[str, Any] = {name: highest + 1}
    with pytest.raises(InvalidRequestError) as caught:
        engine_sampling(GenerationOptions(**beyond))
    assert caught.value.field == name
