"""Tests of conversations in gRPC's Generate: the prompts of HTTP's chats, or the field that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from specray.config import parse_config
from specray.errors import InvalidRequestError
from specray.fakes import FakeRouterClient
from specray.requests import GenerateRequest
from specray.rpc.inference.types import GenerateParams, Message
from specray.serving.grpc.handler import GrpcIngress
from specray.tokenization import Tokenizer
from specray.types import Grammar, GrammarKind
from tests.unit.serving.http.chat.models import HERMES, OPENS_REASONING, PLAIN, chat_tokenizer, service_info
from tests.unit.serving.http.service import MODEL, serving

TOOLS = '[{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]'
CALLS = '[{"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{\\"zone\\": 1}"}}]'
TURNS = (
    Message("developer", "Be brief."),
    Message("user", "How late <|end|> is it?", name="ann"),
    Message("assistant", None, tool_calls=CALLS, reasoning_content="a clock"),
    Message("tool", "noon", tool_call_id="1"),
)
CONFIG = parse_config({"served_model_name": MODEL})


def router_for(tokenizer: Tokenizer) -> FakeRouterClient:
    return FakeRouterClient(reply=lambda _: (5,), info=service_info(tokenizer))


async def over_grpc(tokenizer: Tokenizer, params: GenerateParams) -> GenerateRequest:
    """The request that reaches the router."""
    router = router_for(tokenizer)
    ingress = GrpcIngress(client=router, tokenizer=tokenizer, config=CONFIG)
    async for _ in ingress.generate(params):
        pass
    (request,) = router.requests
    return request


async def over_http(tokenizer: Tokenizer, body: dict[str, Any]) -> GenerateRequest:
    router = router_for(tokenizer)
    async with serving(router, tokenizer=tokenizer, config=CONFIG) as service:
        status, answer = await service.post("/v1/chat/completions", body)
        assert status == 200, answer
    (request,) = router.requests
    return request


async def test_a_conversation_is_the_prompt_that_http_makes_of_it() -> None:
    tokenizer = chat_tokenizer(OPENS_REASONING)
    params = GenerateParams(
        messages=TURNS, tools=TOOLS, chat_template_kwargs='{"enable_thinking": false}', seed=1
    )
    ours = await over_grpc(tokenizer, params)
    theirs = await over_http(
        tokenizer,
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": "How late <|end|> is it?", "name": "ann"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "clock", "arguments": '{"zone": 1}'},
                        }
                    ],
                    "reasoning_content": "a clock",
                },
                {"role": "tool", "content": "noon", "tool_call_id": "1"},
            ],
            "tools": [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}],
            "chat_template_kwargs": {"enable_thinking": False},
            "seed": 1,
        },
    )
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    # As in a chat, the answer may take what the context has left.
    assert ours.max_tokens == theirs.max_tokens > 1000
    assert ours.text == theirs.text
    # Text of users never becomes a control token.
    assert list(ours.prompt_token_ids).count(tokenizer.added_token_id("<|end|>")) == len(TURNS) + 1


async def test_a_grammar_begins_behind_the_reasoning_as_over_http() -> None:
    tokenizer = chat_tokenizer(OPENS_REASONING)
    grammar = Grammar(GrammarKind.REGEX, "[ab]+")
    ours = await over_grpc(tokenizer, GenerateParams(messages=(Message("user", "a"),), grammar=grammar))
    body = {"messages": [{"role": "user", "content": "a"}], "structured_outputs": {"regex": "[ab]+"}}
    theirs = await over_http(tokenizer, body)
    assert ours.sampling.grammar == theirs.sampling.grammar != grammar


@pytest.mark.parametrize(
    ("params", "field", "part"),
    [
        (
            {"messages": TURNS, "text": "a"},
            "messages",
            "messages are set together with text; allowed: one of text, tokens and messages",
        ),
        ({"messages": TURNS, "token_ids": (1,)}, "messages", "set together with tokens"),
        ({"messages": (Message("king", "a"),)}, "messages[0].role", "king"),
        ({"messages": (Message("user"),)}, "messages[0].content", "a string"),
        (
            {"messages": (Message("user", "a"), Message("assistant", tool_calls="[{"))},
            "messages[1].tool_calls",
            "JSON text",
        ),
        (
            {"messages": (Message("assistant", tool_calls='[{"type": "x"}]'),)},
            "messages[0].tool_calls[0]",
            "type function",
        ),
        ({"messages": TURNS, "tools": "["}, "tools", "JSON text"),
        ({"messages": TURNS, "tools": "5"}, "tools", "5"),
        ({"messages": TURNS, "chat_template_kwargs": "[]"}, "chat_template_kwargs", "dictionary"),
        ({"text": "a", "tools": TOOLS}, "tools", "only with messages"),
        ({"text": "a", "chat_template_kwargs": "{}"}, "chat_template_kwargs", "only with messages"),
        ({"messages": (Message("user", "x" * 9000),)}, "messages", "allowed: 1..4095"),
    ],
    ids=lambda value: str(value)[-40:],
)
async def test_a_wrong_conversation_is_refused_by_its_field(
    params: dict[str, Any], field: str, part: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await over_grpc(chat_tokenizer(HERMES), GenerateParams(**params))
    assert part in str(caught.value)
    assert caught.value.field == field


async def test_tools_that_no_template_shows_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="does not show them"):
        await over_grpc(chat_tokenizer(PLAIN), GenerateParams(messages=TURNS[:2], tools=TOOLS))
