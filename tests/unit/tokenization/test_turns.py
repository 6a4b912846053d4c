"""The assistant's messages of a history, in the form that the template takes."""

from __future__ import annotations

from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.tokenization import ChatMessage, ChatOptions
from tests.unit.tokenization.tiny_tokenizer import tiny_tokenizer

CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "({{ call.function.name }}{{ call.function.arguments }}){% endfor %}"
)
FIRST_CALL = (
    "{% if message.tool_calls %}({{ message.tool_calls[0].function.name }}"
    "{{ message.tool_calls[0].function.arguments | tojson }}){% endif %}"
)
ONE_PLACE = (
    "{% if message.tool_calls and message.content and message.thinking %}{{ raise_exception('both') }}"
    "{% elif message.thinking and message.tool_calls %}<{{ message.thinking }}>"
    "{% else %}{{ message.content }}{% endif %}"
)
"""As gpt-oss's template: reasoning is ``thinking``, without content beside it where there are calls."""


def template(body: str) -> str:
    return "{% for message in messages %}[{{ message.role }}]" + body + "{% endfor %}"


USER = ChatMessage("user", "hi")


def assistant(content: str | None = None, reasoning: str = "", *names: str) -> ChatMessage:
    fields: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
    if names:
        fields["tool_calls"] = [
            {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": {}}}
            for name in names
        ]
    return ChatMessage("assistant", content, fields)


def result(name: str | None, content: str) -> ChatMessage:
    return ChatMessage("tool", content, {} if name is None else {"tool_call_id": f"id-{name}"})


def shown(body: str, *messages: ChatMessage, **options: Any) -> str:
    tokenizer = tiny_tokenizer(chat_template=template(body))
    return tokenizer.rendered([USER, *messages], ChatOptions(**options)).text.removeprefix("[user]hi")


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_reasoning_has_the_name_that_the_template_reads(name: str) -> None:
    body = "{{ message.content }}{% if message." + name + " %}<{{ message." + name + " }}>{% endif %}"
    assert shown(body, assistant("a", "Hm.")) == "[assistant]a<Hm.>"


def test_reasoning_has_the_only_place_beside_calls() -> None:
    body = ONE_PLACE + FIRST_CALL
    assert shown(body, assistant("a", "Hm.", "f")) == "[assistant]<Hm.>(f{})"
    assert shown(body, assistant("a", "", "f")) == "[assistant]a(f{})"
    assert shown(body, assistant(None, "Hm.", "f")) == "[assistant]<Hm.>(f{})"
    assert shown(body, assistant("a", "Hm.")) == "[assistant]a"


def test_content_stays_beside_reasoning_where_the_template_takes_both() -> None:
    body = "{% if message.thinking %}<{{ message.thinking }}>{% endif %}{{ message.content }}" + CALLS
    assert shown(body, assistant("a", "Hm.", "f")) == "[assistant]<Hm.>a(f{})"


def test_template_that_refuses_all_still_says_why() -> None:
    body = "{% if message.role == 'assistant' %}{{ raise_exception('never') }}{% endif %}"
    with pytest.raises(InvalidRequestError, match="never"):
        shown(body, assistant("a", "Hm.", "f", "g"))


REFUSES = "{% if message.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}" + FIRST_CALL


@pytest.mark.parametrize("calls", [FIRST_CALL, REFUSES], ids=["drops", "refuses"])
def test_calls_are_single_where_the_template_takes_one(calls: str) -> None:
    body = "{{ message.content }}{% if message.thinking %}<{{ message.thinking }}>{% endif %}" + calls
    many = assistant("a", "Hm.", "f", "g", "h")
    assert shown(body, many, result("g", "2"), result("f", "1"), result("h", "3"), USER) == (
        "[assistant]a<Hm.>(f{})[tool]1[assistant](g{})[tool]2[assistant](h{})[tool]3[user]hi"
    )
    # Results without an id belong to the calls in their order, and none is lost.
    assert shown(body, many, result(None, "1"), result(None, "2"), result(None, "3"), result(None, "4")) == (
        "[assistant]a<Hm.>(f{})[tool]1[assistant](g{})[tool]2[assistant](h{})[tool]3[tool]4"
    )
    assert shown(body, many, result("h", "3"), result("x", "4")) == (
        "[assistant]a<Hm.>(f{})[assistant](g{})[assistant](h{})[tool]3[tool]4"
    )


def test_several_calls_stay_in_one_message_where_the_template_takes_them() -> None:
    body = "{{ message.content }}" + CALLS
    many = assistant("a", "", "f", "g")
    assert shown(body, many, result("g", "2"), result("f", "1")) == "[assistant]a(f{})(g{})[tool]2[tool]1"


DEFAULTS = (
    "{% for tool in tools or [] %}{% for spec in tool.function.parameters.properties.values() %}"
    "{% if spec.enum or spec.oneOf %}{{ 'd=' + spec.default }}"
    "{% else %}{{ spec.default | tojson }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"enum": [1], "default": 1}, "d=1"),
        ({"enum": ["a"], "default": "a"}, "d=a"),
        ({"enum": [None], "default": None}, "d=null"),
        ({"oneOf": [{"type": "integer"}], "default": 3}, "d=3"),
        ({"type": "integer", "default": 1}, "1"),
    ],
)
def test_defaults_beside_choices_are_text_where_the_template_joins_them(
    schema: dict[str, Any], text: str
) -> None:
    properties = {"parameters": {"type": "object", "properties": {"a": schema}}}
    tool = {"type": "function", "function": {"name": "f", **properties}}
    tokenizer = tiny_tokenizer(chat_template=DEFAULTS)
    assert tokenizer.rendered([USER], ChatOptions(tools=[tool])).text == text


def test_schemas_are_as_they_came_where_the_template_does_not_mind() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": [1], "default": 1}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    tokenizer = tiny_tokenizer(chat_template="{{ tools | tojson }}")
    assert '"default": 1}' in tokenizer.rendered([USER], ChatOptions(tools=[tool])).text
