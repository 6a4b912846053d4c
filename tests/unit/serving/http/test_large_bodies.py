"""Tests of bodies that are large and wrong: refused at the first mistake, before much work is done."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

from specray.errors import InvalidRequestError, shown
from specray.grammar.forms import grammar_of
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.messages_api.schema import MessagesRequest
from specray.serving.http.responses_api.schema import ResponsesRequest
from specray.serving.http.routes.tokens import DetokenizeRequest
from specray.serving.http.schemas import CompletionRequest, Fields, parse_request

NUMBER = 250_000
"""Entries of a list: what is wrong with each took a second and more to find."""
MANY = {str(entry): "x" for entry in range(NUMBER)}
USER = {"role": "user", "content": "a"}
MESSAGE = {"max_tokens": 1, "messages": [USER]}


@pytest.fixture
def quickly() -> Iterator[None]:
    """Fails a test that takes a second of the processor; with every mistake found, each took two and more."""
    # What other tests have left is not searched for garbage, now or later; see tests/conftest.py.
    gc.collect()
    gc.freeze()
    started_s = time.process_time()
    yield
    taken_s = time.process_time() - started_s
    assert taken_s < 1.0


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("schema", "body", "message"),
    [
        (CompletionRequest, MANY, f"the body has {NUMBER} fields; allowed: at most 1024"),
        (CompletionRequest, {"stop_token_ids": ["a"] * NUMBER}, "stop_token_ids[0] is 'a'; "),
        (CompletionRequest, {"bad_words": [1] * NUMBER}, "bad_words[0] is 1; "),
        (CompletionRequest, {"allowed_token_ids": [1, "a"] * NUMBER}, "allowed_token_ids[1] is 'a'; "),
        (
            CompletionRequest,
            {"logit_bias": MANY},
            f"number of entries in logit_bias is {NUMBER}; allowed: 0..1024",
        ),
        (CompletionRequest, {"slo": MANY}, f"number of entries in slo is {NUMBER}; allowed: 0..1024"),
        (ChatCompletionRequest, {"messages": [1] * NUMBER}, "messages[0] is 1; "),
        (ChatCompletionRequest, {"messages": [USER, {}] * 4000}, "messages[1].role is missing"),
        (
            ChatCompletionRequest,
            {"messages": [USER] * 8193},
            "number of entries in messages is 8193; allowed: 0..8192",
        ),
        (
            MessagesRequest,
            {**MESSAGE, "messages": [1] * NUMBER},
            f"number of entries in messages is {NUMBER}; ",
        ),
        (MessagesRequest, {**MESSAGE, "stop_sequences": [1] * NUMBER}, "stop_sequences[0] is 1; "),
        (MessagesRequest, {**MESSAGE, "bad_words": [1] * NUMBER}, "bad_words[0] is 1; "),
        (MessagesRequest, {**MESSAGE, "logit_bias": MANY}, f"number of entries in logit_bias is {NUMBER}; "),
        (ResponsesRequest, {"input": "a", "include": [1] * NUMBER}, "include[0] is 1; "),
        (
            ResponsesRequest,
            {"input": "a", "metadata": dict.fromkeys(MANY, 1)},
            f"number of entries in metadata is {NUMBER}; allowed: 0..1024",
        ),
        (DetokenizeRequest, {"tokens": ["a"] * NUMBER}, "tokens[0] is 'a'; "),
    ],
)
def test_the_first_mistake_is_enough(schema: type[Fields], body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_request(schema, body)
    assert str(raised.value).startswith(message)


def test_lists_as_long_as_they_may_be_are_taken() -> None:
    chat = parse_request(ChatCompletionRequest, {"messages": [USER] * 8192})
    assert len(chat.chat()) == 8192
    assert len(parse_request(DetokenizeRequest, {"tokens": [1] * NUMBER}).tokens) == NUMBER


@pytest.mark.usefixtures("quickly")
def test_calls_of_one_message_are_counted_and_tools_of_other_apis_not_translated() -> None:
    calls = [{"function": {"name": "f"}}] * 1025
    chat = parse_request(ChatCompletionRequest, {"messages": [{"role": "assistant", "tool_calls": calls}]})
    with pytest.raises(InvalidRequestError, match=r"number of calls in .* is 1025; allowed: 0..1024"):
        chat.chat()
    tools = [{"name": "f"}] * NUMBER
    translated = parse_request(MessagesRequest, {**MESSAGE, "tools": tools}).chat()
    with pytest.raises(InvalidRequestError, match="allowed: a list of at most 512 tools"):
        parse_request(ChatCompletionRequest, translated).tool_use()


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    "fields",
    [
        {"ebnf": 'root ::= "a"' + ' "a"' * NUMBER},
        {"guided_regex": "a" * NUMBER},
        {"guided_json": " " * NUMBER},
        {"structured_outputs": {"grammar": "a" * NUMBER}},
    ],
)
def test_a_long_grammar_is_refused_unread(fields: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^number of characters in .* is \d+; allowed: at most 65536"
    ):
        grammar_of(fields)


@pytest.mark.parametrize(
    ("schema", "num_counted"),
    [
        ({"enum": ["a" * 16_381] * 4}, 65_540),
        ({"enum": [1] * 65_529}, 65_537),
        ({"properties": {f"{entry:010}": {} for entry in range(5_461)}}, 65_538),
        ({"properties": {name: {"type": "string"} for name in MANY}}, 1_388_904),
        ({"a": {"b": {"c": ["x" * 70_000]}}}, 70_013),
    ],
)
def test_a_large_schema_is_refused_unwritten(schema: dict[str, Any], num_counted: int) -> None:
    words = f"has at least {num_counted} characters; allowed: at most 65536"
    with pytest.raises(InvalidRequestError, match=words) as raised:
        grammar_of({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
    assert raised.value.field == "response_format.json_schema.schema"


def test_a_schema_of_the_largest_size_is_read() -> None:
    # The text has quotes, commas and options beside what is counted.
    for schema in ({"enum": ["a" * 16_380] * 4}, {"enum": [1] * 65_528}):
        assert grammar_of({"guided_json": schema}) is not None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a'b", '"a\'b"'),
        ([1, "a", {"b": [None, True]}], "[1, 'a', {'b': [None, True]}]"),
        ([], "[]"),
        ({}, "{}"),
        ("x" * 58, "'" + "x" * 58 + "'"),
        ("x" * 59, "'" + "x" * 56 + "..."),
        (list(range(21)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16..."),
    ],
)
def test_a_value_is_shown_as_python_writes_it_and_cut(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.usefixtures("quickly")
def test_of_a_large_value_the_start_alone_is_read() -> None:
    value: object = {"a": [["x" * 10**6] * 10**6] * 10**6}
    assert shown(value) == "{'a': [['" + "x" * 48 + "..."
