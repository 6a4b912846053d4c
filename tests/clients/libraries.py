"""Checks of client libraries."""

from __future__ import annotations

import os
from typing import Any

from tests.clients.checks import (
    MAX_TOKENS,
    MESSAGES,
    NAMED,
    PARAMETERS,
    QUESTION,
    TOOL,
    Server,
    Weather,
    check,
    openai_client,
)


@check("openai")
def models(server: Server) -> None:
    client = openai_client(server)
    assert server.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(server.model).id == server.model


@check("openai")
def completion_and_its_stream(server: Server) -> None:
    asked = {"model": server.model, "prompt": "1, 2, 3,", "max_tokens": 8, "temperature": 0}
    client = openai_client(server)
    whole = client.completions.create(**asked).choices[0].text
    parts = [event.choices[0].text for event in client.completions.create(**asked, stream=True)]
    assert whole and "".join(parts) == whole


@check("openai")
def chat_and_its_stream(server: Server) -> None:
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    client = openai_client(server)
    answer = client.chat.completions.create(**asked)
    assert answer.usage.completion_tokens > 0
    events = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    parts = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(parts) == answer.choices[0].message.content
    assert events[-1].usage.completion_tokens == answer.usage.completion_tokens


@check("openai")
def chat_parse_and_its_stream(server: Server) -> None:
    client = openai_client(server)
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": MAX_TOKENS}
    answer = client.chat.completions.parse(**asked, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(**asked, response_format=Weather) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather)


@check("openai")
def tools_round_trip(server: Server) -> None:
    client = openai_client(server)
    asked = {"model": server.model, "tools": [TOOL], "max_tokens": MAX_TOKENS}
    first = client.chat.completions.create(**asked, messages=MESSAGES, tool_choice=NAMED)
    message = first.choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    second = client.chat.completions.create(
        **asked, messages=[*MESSAGES, message, result], tool_choice="none"
    )
    assert second.choices[0].message.tool_calls is None


@check("openai")
def responses_and_their_stream(server: Server) -> None:
    client = openai_client(server)
    asked = {"model": server.model, "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert whole.output_text is not None
    parsed = client.responses.parse(
        model=server.model, input=QUESTION, text_format=Weather, max_output_tokens=MAX_TOKENS
    )
    assert isinstance(parsed.output_parsed, Weather)


@check("openai")
def errors_have_their_classes(server: Server) -> None:
    import openai

    client = openai_client(server)
    for fields, kind in (
        ({"temperature": 9}, openai.BadRequestError),
        ({"model": "x"}, openai.NotFoundError),
    ):
        try:
            client.chat.completions.create(**{"model": server.model, "messages": MESSAGES, **fields})
        except kind:
            continue
        raise AssertionError(f"{fields} was answered")


def _anthropic(server: Server) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0, timeout=300)


@check("anthropic")
def messages_and_their_stream(server: Server) -> None:
    client = _anthropic(server)
    # The client has no argument for it any more.
    greedy = {"extra_body": {"temperature": 0}}
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 16, **greedy}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content)
    assert final.usage.output_tokens == whole.usage.output_tokens


@check("anthropic")
def count_tokens(server: Server) -> None:
    assert _anthropic(server).messages.count_tokens(model=server.model, messages=MESSAGES).input_tokens > 0


@check("anthropic")
def anthropic_tools(server: Server) -> None:
    answer = _anthropic(server).messages.create(
        model=server.model,
        messages=MESSAGES,
        max_tokens=MAX_TOKENS,
        tools=[{"name": "get_weather", "description": "Tells the weather.", "input_schema": PARAMETERS}],
        tool_choice={"type": "tool", "name": "get_weather"},
    )
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "get_weather" and call.input["city"] in ("Rome", "Paris")


def _langchain(server: Server) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=server.model,
        base_url=server.base_url,
        api_key=server.key,
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
    )


@check("langchain-openai")
def invoke_and_stream(server: Server) -> None:
    chat = _langchain(server)
    whole = chat.invoke(QUESTION)
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in chat.stream(QUESTION)) == whole.content


@check("langchain-openai")
def with_structured_output(server: Server) -> None:
    assert isinstance(_langchain(server).with_structured_output(Weather).invoke(QUESTION), Weather)


@check("langchain-openai")
def bind_tools(server: Server) -> None:
    chat = _langchain(server).bind_tools([TOOL], tool_choice="get_weather")
    (call,) = chat.invoke(QUESTION).tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Rome", "Paris")
    parts = list(chat.stream(QUESTION))
    merged = parts[0]
    for part in parts[1:]:
        merged = merged + part
    assert [call["name"] for call in merged.tool_calls] == ["get_weather"]


@check("langchain-openai")
def with_structured_output_by_function_calling(server: Server) -> None:
    chat = _langchain(server).with_structured_output(Weather, method="function_calling")
    assert isinstance(chat.invoke(QUESTION), Weather)


def _litellm(server: Server) -> tuple[Any, dict[str, Any]]:
    # Else it asks the internet for prices.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    model = f"openai/{server.model}"
    return litellm, {"model": model, "api_base": server.base_url, "api_key": server.key, "num_retries": 0}


@check("litellm")
def library_call_and_stream(server: Server) -> None:
    litellm, where = _litellm(server)
    asked = {**where, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    whole = litellm.completion(**asked)
    assert whole.usage.completion_tokens > 0
    parts = [event.choices[0].delta.content or "" for event in litellm.completion(**asked, stream=True)]
    assert "".join(parts) == whole.choices[0].message.content


@check("litellm")
def library_structured_output(server: Server) -> None:
    litellm, where = _litellm(server)
    answer = litellm.completion(**where, messages=MESSAGES, max_tokens=MAX_TOKENS, response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)


@check("litellm")
def library_text_completion(server: Server) -> None:
    litellm, where = _litellm(server)
    where["model"] = f"text-completion-{where['model']}"
    answer = litellm.text_completion(**where, prompt="1, 2, 3,", max_tokens=8)
    assert answer.choices[0].text


@check("litellm")
def library_tools(server: Server) -> None:
    litellm, where = _litellm(server)
    answer = litellm.completion(
        **where, messages=MESSAGES, max_tokens=MAX_TOKENS, tools=[TOOL], tool_choice=NAMED
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


def _instructor(server: Server, mode: str) -> Any:
    import instructor

    return instructor.from_openai(openai_client(server), mode=getattr(instructor.Mode, mode))


@check("instructor")
def by_json_schema(server: Server) -> None:
    client = _instructor(server, "JSON_SCHEMA")
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": MAX_TOKENS}
    assert isinstance(client.create(**asked, response_model=Weather, max_retries=1), Weather)


@check("instructor")
def by_tools(server: Server) -> None:
    client = _instructor(server, "TOOLS")
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": MAX_TOKENS}
    assert isinstance(client.create(**asked, response_model=Weather, max_retries=1), Weather)
