"""Messages of the public service survive the wire; malformed requests are refused by their field."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.errors import InvalidRequestError
from specray.requests import FinishReason, ServiceInfo, SpeculationStats
from specray.rpc.codec import inference as inference_codec
from specray.rpc.inference.server import GenerateEvent, GenerateParams, Usage
from specray.rpc.inference.types import Message
from specray.rpc.pb import inference_pb2, types_pb2
from specray.types import DraftKind, Grammar, GrammarKind, Verification
from tests.rpc.strategies import F32, IDS, TEXT, U32, U64, token_logprobs, tuples_of

PARAMS = st.builds(
    GenerateParams,
    model=TEXT,
    max_tokens=st.none() | U32,
    min_tokens=st.none() | U32,
    temperature=st.none() | F32,
    top_k=st.none() | U32,
    top_p=st.none() | F32,
    min_p=st.none() | F32,
    repetition_penalty=st.none() | F32,
    presence_penalty=st.none() | F32,
    frequency_penalty=st.none() | F32,
    logit_bias=tuples_of(st.tuples(U32, F32)),
    seed=st.none() | U64,
    stop=tuples_of(TEXT),
    stop_token_ids=IDS,
    ignore_eos=st.booleans(),
    logprobs=st.none() | U32,
    speculation_enabled=st.none() | st.booleans(),
    num_speculative_tokens=st.none() | U32,
    verification=st.none() | st.sampled_from(Verification),
    draft=st.none() | st.sampled_from(DraftKind),
    tenant=TEXT,
    prediction=TEXT,
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), TEXT),
    allowed_token_ids=st.none() | IDS.filter(bool),
    bad_words=tuples_of(TEXT),
    skip_special_tokens=st.none() | st.booleans(),
    include_stop_str_in_output=st.booleans(),
    truncate_prompt_tokens=st.none() | st.integers(-(2**31), 2**31 - 1),
    cache_salt=TEXT,
    ttft_ms=st.none() | st.floats(0, 1e6),
    itl_ms=st.none() | st.floats(0, 1e6),
    tools=TEXT,
    chat_template_kwargs=TEXT,
)
MESSAGE = st.builds(Message, TEXT, st.none() | TEXT, TEXT, TEXT, TEXT, TEXT)
PROMPTS = st.one_of(
    st.tuples(TEXT, st.none(), st.just(())),
    st.tuples(st.none(), IDS, st.just(())),
    st.tuples(st.none(), st.none(), tuples_of(MESSAGE).filter(bool)),
    # Which is not allowed, but the handler says so.
    st.tuples(TEXT, st.none(), tuples_of(MESSAGE).filter(bool)),
)


@settings(max_examples=50)
@given(PARAMS, PROMPTS)
def test_generate_request_round_trip(params: GenerateParams, prompt: tuple) -> None:
    params = replace(params, text=prompt[0], token_ids=prompt[1], messages=prompt[2])
    assert inference_codec.decode_generate_request(inference_codec.encode_generate_request(params)) == params


EVENTS = st.builds(
    GenerateEvent,
    TEXT,
    TEXT,
    IDS,
    tuples_of(token_logprobs()),
    st.none() | st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]),
    st.none() | st.builds(Usage, U32, U32),
    st.none() | st.builds(SpeculationStats, U32, U32, U32, IDS, U32, U32),
)


@pytest.mark.slow
@given(EVENTS)
def test_generate_event_round_trip(event: GenerateEvent) -> None:
    assert inference_codec.decode_generate_event(inference_codec.encode_generate_event(event)) == event


@given(st.builds(ServiceInfo, TEXT, st.none() | st.text(min_size=1, max_size=5), U32, U32, U32, TEXT))
def test_service_info_round_trip(info: ServiceInfo) -> None:
    assert inference_codec.decode_service_info(inference_codec.encode_service_info(info)) == info


@pytest.mark.parametrize(
    ("data", "field", "says"),
    [
        (b"\xff\xff", None, "specray.v1.GenerateRequest"),
        (b"\x12\x01\xff", None, "not UTF-8"),
        (b"", "prompt", "give text, tokens or messages"),
        (
            inference_pb2.GenerateRequest(
                text="a", speculation=inference_pb2.SpeculationParams(verification=5)
            ).SerializeToString(),
            "speculation.verification",
            "speculation.verification is 5; allowed: 1 (coupled), 2 (rejection)",
        ),
        (
            inference_pb2.GenerateRequest(
                text="a",
                grammar=types_pb2.Grammar(kind=9),  # type: ignore[arg-type]
            ).SerializeToString(),
            "grammar.kind",
            "grammar.kind is 9; allowed: 1 (JSON schema), 2 (Lark), 3 (regex)",
        ),
    ],
)
def test_malformed_public_request_names_the_field(data: bytes, field: str | None, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        inference_codec.decode_generate_request(data)
    assert says in str(caught.value)
    assert caught.value.field == field


def test_an_empty_token_prompt_is_not_an_absent_one() -> None:
    data = inference_codec.encode_generate_request(GenerateParams(token_ids=()))
    assert inference_codec.decode_generate_request(data).token_ids == ()


@pytest.mark.parametrize("params", [GenerateParams(token_ids=(-1,)), GenerateParams(text="a", seed=2**64)])
def test_what_the_wire_cannot_carry_is_refused_by_the_client(params: GenerateParams) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        inference_codec.encode_generate_request(params)


def test_not_a_number_reaches_the_handler_who_refuses_it() -> None:
    data = inference_codec.encode_generate_request(GenerateParams(text="a", temperature=math.nan))
    temperature = inference_codec.decode_generate_request(data).temperature
    assert temperature is not None
    assert math.isnan(temperature)


def test_unknown_draft_kind_names_the_field() -> None:
    data = inference_codec.encode_generate_request(GenerateParams(text="a", draft=DraftKind.NGRAM))
    message = inference_pb2.GenerateRequest.FromString(data)
    message.speculation.draft = 9
    with pytest.raises(
        InvalidRequestError, match=r"9; allowed: 1 \(model\), 2 \(ngram\), 3 \(suffix\)"
    ) as caught:
        inference_codec.decode_generate_request(message.SerializeToString())
    assert caught.value.field == "speculation.draft"
