"""Messages of the public service survive the wire; malformed requests are refused by their field."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.errors import InvalidRequestError
from specray.request_options import OPTIONS
from specray.requests import FinishReason, ServedModel, ServiceInfo, SpeculationStats
from specray.rpc.codec import inference as inference_codec
from specray.rpc.inference.types import GenerateEvent, GenerateParams, Message, TokenUsage
from specray.rpc.pb import inference_pb2, types_pb2
from specray.types import DraftKind
from tests.rpc.strategies import IDS, TEXT, U32, U64, built, token_logprobs, tuples_of

PARAMS = built(
    GenerateParams,
    [*(each.name for each in OPTIONS.values() if each.on_wire), "tools", "chat_template_kwargs", "model"],
    seed=st.none() | U64,
    truncate_prompt_tokens=st.none() | st.integers(-(2**31), 2**31 - 1),
    allowed_token_ids=st.none() | IDS.filter(bool),
)
MESSAGE = built(Message)
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
    st.none() | built(TokenUsage),
    st.none() | built(SpeculationStats),
)


@pytest.mark.slow
@given(EVENTS)
def test_generate_event_round_trip(event: GenerateEvent) -> None:
    assert inference_codec.decode_generate_event(inference_codec.encode_generate_event(event)) == event


SERVED_MODELS = st.lists(st.builds(ServedModel, TEXT, st.lists(TEXT).map(tuple), TEXT)).map(tuple)


@given(
    st.builds(
        ServiceInfo,
        TEXT,
        st.none() | st.text(min_size=1, max_size=5),
        *(U32, U32, U32, TEXT),
        models=SERVED_MODELS,
    )
)
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
