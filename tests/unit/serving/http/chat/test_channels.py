"""gpt-oss's channels over HTTP: in chats, responses and messages, whole and streamed, free and forced."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from specray.demo.paths import demo_target_path
from specray.serving.tools.harmony.channels import Marker
from specray.tokenization import Tokenizer
from tests.unit.serving.http.chat.models import babbling, grammar_compiler, saying
from tests.unit.serving.http.service import events_of, serving, typed_events_of

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "2+2?"}]
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% for tool in tools or [] %}<|start|>developer<|message|>// {{ tool.function.description }}\n"
    "type {{ tool.function.name }}<|end|>{% endfor %}"
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm."
FINAL = "<|channel|>final<|message|>"
ROME = '{"city": "Rome"}'
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}<|call|>"
FULL = f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{CALL}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}


@functools.cache
def channel_tokenizer(opening: str = "") -> Tokenizer:
    """The embedded target's vocabulary with gpt-oss's control tokens. ``opening``: ends the prompt."""
    backend = Backend.from_file(str(demo_target_path() / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(marker, special=True) for marker in Marker])
    ends = [backend.token_to_id(marker) for marker in (Marker.RETURN, Marker.CALL)]
    template = TEMPLATE.replace("<|start|>assistant{% endif %}", f"<|start|>assistant{opening}{{% endif %}}")
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<s>", "eos_token": "<|return|>"},
        chat_template=template,
        eos_token_ids=[1, *ends],
    )


async def ask(text: str, *, chunk_size: int = 3, opening: str = "", **fields: Any) -> Any:
    router = saying(channel_tokenizer(opening), text, chunk_size=chunk_size)
    async with serving(router) as service:
        status, answer = await service.post(CHAT, {"messages": USER, **fields})
    assert status == 200, answer
    return answer


def message_of(answer: Any) -> tuple[Any, Any, Any]:
    message = answer["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"], message.get("reasoning_content"), [
        (call["name"], call["arguments"]) for call in calls
    ]  # fmt: skip


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
async def test_chat_has_the_final_channel_as_content(chunk_size: int) -> None:
    answer = await ask(f"{THOUGHT}{NEXT}{FINAL}4<|return|>", chunk_size=chunk_size)
    assert message_of(answer) == ("4", "Hm.", [])
    assert answer["choices"][0]["finish_reason"] == "stop"
    # "<|message|>", "H", "m", "." and "<|end|>", as the vocabulary cuts them.
    num_tokens = len(channel_tokenizer().encode("<|message|>Hm.<|end|>", add_special_tokens=False))
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"skip_special_tokens": False},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False, "include_stop_str_in_output": True},
        {"logprobs": True, "top_logprobs": 1},
        {"stop": ["<|end|>x", "<|channel|>other", "zz"]},
        {"stop": ["<|return|>"]},
        {"ignore_eos": True, "stop_token_ids": [1]},
        {"n": 2},
    ],
    ids=str,
)
async def test_options_of_the_text_leave_channels_as_they_are(fields: dict[str, Any]) -> None:
    answer = await ask(f"{THOUGHT}{NEXT}{FINAL}4<|return|>", **fields)
    assert message_of(answer) == ("4", "Hm.", [])
    assert all(choice["message"]["content"] == "4" for choice in answer["choices"])


async def test_stop_string_cuts_the_content() -> None:
    answer = await ask(f"{THOUGHT}{NEXT}{FINAL}One, two.<|return|>", stop=[" two"])
    assert message_of(answer) == ("One,", "Hm.", [])
    assert answer["choices"][0]["stop_reason"] == " two"


@pytest.mark.parametrize("stream", [False, True])
async def test_call_in_the_commentary_is_a_tool_call(stream: bool) -> None:
    async with serving(saying(channel_tokenizer(), FULL, chunk_size=4)) as service:
        body = {"messages": USER, "tools": [WEATHER], "stream": stream}
        if stream:
            events = await events_of(service, CHAT, body)
        else:
            _, answer = await service.post(CHAT, body)
    if not stream:
        assert message_of(answer) == ("I look.", "Hm.", [("get_weather", ROME)])
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        return
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert "".join(call["function"]["arguments"] for call in calls) == ROME
    assert len(calls) > 2
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("chunk_size", [1, 1000])
@pytest.mark.parametrize("stream", [False, True])
async def test_response_has_an_item_for_each_part(stream: bool, chunk_size: int) -> None:
    router = saying(channel_tokenizer(), FULL, chunk_size=chunk_size)
    body = {"input": "Weather?", "tools": [{"type": "function", **WEATHER["function"]}]}
    async with serving(router) as service:
        if stream:
            answer = (await typed_events_of(service, "/v1/responses", body))[-1]["response"]
        else:
            _, answer = await service.post("/v1/responses", body)
    reasoning, message, call = answer["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "Hm.")
    assert (message["type"], message["content"][0]["text"]) == ("message", "I look.")
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "get_weather", ROME)


@pytest.mark.parametrize("chunk_size", [1, 1000])
async def test_parts_that_alternate_keep_their_order(chunk_size: int) -> None:
    text = f"<|channel|>commentary<|message|>a{NEXT}{THOUGHT}{NEXT}{FINAL}b"
    router = saying(channel_tokenizer(), text, chunk_size=chunk_size)
    async with serving(router) as service:
        _, answer = await service.post("/v1/responses", {"input": "a"})
        events = await typed_events_of(service, "/v1/responses", {"input": "a"})
        body = {"messages": USER, "max_tokens": 99}
        _, message = await service.post("/v1/messages", body)
        blocks = await typed_events_of(service, "/v1/messages", body)
    expected = [("message", "a"), ("reasoning", "Hm."), ("message", "\nb")]
    for response in (answer, events[-1]["response"]):
        assert [(item["type"], item["content"][0]["text"]) for item in response["output"]] == expected
    assert [block["type"] for block in message["content"]] == ["text", "thinking", "text"]
    kinds = [event["content_block"]["type"] for event in blocks if event["type"] == "content_block_start"]
    assert kinds == ["text", "thinking", "text"]


async def test_logprobs_of_a_response_are_those_of_its_text_and_end() -> None:
    router = saying(channel_tokenizer(), f"{THOUGHT}{NEXT}{FINAL}One, two.<|return|>")
    async with serving(router) as service:
        _, answer = await service.post("/v1/responses", {"input": "a", "top_logprobs": 1})
    part = answer["output"][1]["content"][0]
    assert part["text"] == "One, two."
    assert "".join(entry["token"] for entry in part["logprobs"]) == "One, two.<|return|>"


@pytest.mark.parametrize("chunk_size", [1, 1000])
@pytest.mark.parametrize("stream", [False, True])
async def test_message_has_a_block_for_each_part(stream: bool, chunk_size: int) -> None:
    router = saying(channel_tokenizer(), FULL, chunk_size=chunk_size)
    body = {
        "messages": USER,
        "max_tokens": 300,
        "tools": [{"name": "get_weather", "description": "d", "input_schema": SCHEMA}],
    }
    async with serving(router) as service:
        if stream:
            events = await typed_events_of(service, "/v1/messages", body)
        else:
            _, answer = await service.post("/v1/messages", body)
    if not stream:
        assert [{**block, "id": ""} if "id" in block else block for block in answer["content"]] == [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "", "name": "get_weather", "input": json.loads(ROME)},
        ]
        assert answer["stop_reason"] == "tool_use"
        return
    kinds = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("partial_json", "") for delta in deltas) == ROME


async def test_token_of_a_message_s_end_does_not_end_the_answer() -> None:
    tokenizer = channel_tokenizer()
    router = saying(tokenizer, f"{THOUGHT}{NEXT}{FINAL}4<|return|>")
    async with serving(router) as service:
        await service.post(CHAT, {"messages": USER})
    ids = [tokenizer.added_token_id(marker) for marker in (Marker.RETURN, Marker.CALL)]
    assert set(ids) < set(router.requests[0].eos_token_ids)
    assert tokenizer.added_token_id(Marker.END) not in router.requests[0].eos_token_ids


async def test_effort_reaches_the_template() -> None:
    tokenizer = channel_tokenizer()
    router = saying(tokenizer, FINAL + "4")
    async with serving(router) as service:
        await service.post(CHAT, {"messages": USER, "reasoning_effort": "high"})
        await service.post("/v1/responses", {"input": "a", "reasoning": {"effort": "high"}})
        body = {"messages": USER, "max_tokens": 9, "output_config": {"effort": "high"}}
        await service.post("/v1/messages", body)
    prompts = [tokenizer.decode(request.prompt_token_ids) for request in router.requests]
    assert ["Reasoning: high" in prompt for prompt in prompts] == [True] * 3


@pytest.mark.parametrize("is_reasoning", [True, False])
async def test_prompt_that_opens_a_channel_is_read_on(is_reasoning: bool) -> None:
    opening = "<|channel|>analysis<|message|>" if is_reasoning else FINAL
    answer = await ask(f"Hm.{NEXT}{FINAL}4" if is_reasoning else "Hm.4", opening=opening)
    assert message_of(answer) == (("4", "Hm.", []) if is_reasoning else ("Hm.4", None, []))


async def test_message_that_goes_on_is_content() -> None:
    history = [*USER, {"role": "assistant", "content": "It is"}]
    answer = await ask(" 4<|return|>", messages=history, continue_final_message=True)
    assert message_of(answer) == (" 4", None, [])


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
FORCED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"response_format": FORM},
        [
            f"{FINAL}12",
            f"{THOUGHT}{NEXT}{FINAL}12",
            f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}<|channel|>final <|constrain|>json<|message|>12",
        ],
        ["12", f"{FINAL}a", f"{THOUGHT}{NEXT}{FINAL}a", f"<|channel|>commentary<|message|>12{NEXT}", " to="],
    ),
    (
        {"guided_choice": ["analysis"]},
        [f"{FINAL}analysis", f"{THOUGHT}{NEXT}{FINAL}analysis"],
        ["analysis", f"{FINAL}final"],
    ),
    (
        {"tools": [WEATHER, CLOCK], "tool_choice": "required"},
        [
            CALL.removesuffix("<|call|>"),
            f"{THOUGHT}{NEXT}{CALL}".removesuffix("<|call|>"),
            f" to=functions.get_weather<|channel|>commentary json<|message|>{ROME}",
            " to=functions.clock<|channel|>commentary<|message|>{}",
        ],
        [
            f"{FINAL}a",
            f"{THOUGHT}{NEXT}{FINAL}",
            "a",
            "<|channel|>commentary<|message|>",
            CALL.replace("Rome", "Bonn"),
            "<|channel|>commentary to=functions.other<|message|>{}",
        ],
    ),
    (
        {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
        ["<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"],
        [CALL],
    ),
    (
        {"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]},
        [
            f"{FINAL}a{{",
            f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>b{NEXT}{FINAL}a",
            f"{THOUGHT}{NEXT}{CALL}".removesuffix("<|call|>"),
        ],
        ["a", CALL.replace("Rome", "Bonn"), "<|channel|>analysis to=functions.get_weather<|message|>{}"],
    ),
    (
        {"tools": [WEATHER], "response_format": FORM},
        [f"{THOUGHT}{NEXT}{FINAL}12", CALL.removesuffix("<|call|>")],
        [f"{FINAL}a", f"<|channel|>commentary<|message|>b{NEXT}", CALL.replace("Rome", "Bonn")],
    ),
]


@pytest.mark.parametrize(("fields", "right", "wrong"), FORCED, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("opening", ["", "<|channel|>analysis<|message|>"], ids=["", "in-reasoning"])
async def test_grammar_binds_the_final_message_or_the_call_alone(
    fields: dict[str, Any], right: list[str], wrong: list[str], opening: str
) -> None:
    tokenizer = channel_tokenizer(opening)
    before = f"Hm.{NEXT}" if opening else ""
    router = saying(tokenizer, before + right[0])
    async with serving(router) as service:
        status, answer = await service.post(CHAT, {"messages": USER, **fields})
    assert status == 200, answer
    matcher = grammar_compiler(tokenizer).matcher(router.requests[0].sampling.grammar)
    for text in right:
        tokens = tokenizer.encode(before + text, add_special_tokens=False)
        assert matcher.count_legal((), (*tokens, 1)) == len(tokens) + 1, text
    for text in wrong:
        tokens = tokenizer.encode(before + text, add_special_tokens=False)
        assert matcher.count_legal((), tokens) < len(tokens), text


@pytest.mark.parametrize("fields", [fields for fields, *_ in FORCED], ids=lambda value: str(value)[:60])
async def test_what_is_forced_reads_back(fields: dict[str, Any]) -> None:
    async with serving(babbling(channel_tokenizer(), seed=0)) as service:
        answers = [(await service.post(CHAT, {"messages": USER, **fields}))[1] for _ in range(4)]
    ended = [answer for answer in answers if answer["choices"][0]["finish_reason"] != "length"]
    assert ended
    for answer in ended:
        content, _, calls = message_of(answer)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMA if name == "get_weather" else {})
        if not calls and "response_format" in fields:
            assert isinstance(json.loads(content), int)
        assert bool(calls) or fields.get("tool_choice") is None


def spelling(text: str) -> str:
    """A Lark grammar of this very text, control tokens as tokens."""
    ids = {str(marker): channel_tokenizer().added_token_id(marker) for marker in Marker}
    parts = [part for part in re.split(f"({'|'.join(map(re.escape, ids))})", text) if part]
    return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts)


@pytest.mark.parametrize("rules", ["start: {}", "start: a\na: {}"], ids=["one", "several"])
@pytest.mark.parametrize("opening", ["", "<|channel|>analysis<|message|>"], ids=["", "in-reasoning"])
async def test_grammar_that_spells_the_channels_is_the_whole_answer(rules: str, opening: str) -> None:
    text = f"Hm.{NEXT}{CALL}" if opening else f"{THOUGHT}{NEXT}{CALL}"
    grammar = rules.format(spelling(text))
    router = saying(channel_tokenizer(opening), text)
    async with serving(router) as service:
        body = {"messages": USER, "tools": [WEATHER], "structured_outputs": {"grammar": grammar}}
        status, answer = await service.post(CHAT, body)
    assert status == 200, answer
    assert message_of(answer) == (None, "Hm.", [("get_weather", ROME)])
    assert router.requests[0].sampling.grammar.source == grammar


async def test_text_that_names_control_tokens_spells_no_channels() -> None:
    answer = await ask(f"{THOUGHT}{NEXT}{FINAL}a<|return|>", guided_choice=["a", "<|channel|>"])
    assert message_of(answer) == ("a", "Hm.", [])
    router = saying(channel_tokenizer(), FINAL + "a")
    async with serving(router) as service:
        await service.post(CHAT, {"messages": USER, "guided_choice": ["a", "<|channel|>"]})
    assert router.requests[0].sampling.grammar.source.startswith("%llguidance {}\nstart: rest")


async def test_strict_tools_cannot_hold_under_a_grammar_that_spells_the_channels() -> None:
    tools = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]
    body = {"messages": USER, "tools": tools, "guided_grammar": f"start: {spelling(FINAL + '4')}"}
    async with serving(saying(channel_tokenizer(), FINAL + "4")) as service:
        status, answer = await service.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("opening", ["", "<|channel|>analysis<|message|>"])
async def test_grammar_of_several_rules_holds_from_the_first_token_on(opening: str) -> None:
    answer = await ask("b", opening=opening, guided_grammar='start: a\na: "b"')
    assert message_of(answer) == ("b", None, [])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [CLOCK], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": FORM}, "response_format"),
    ],
)
async def test_half_a_header_in_the_prompt_cannot_be_forced(fields: dict[str, Any], name: str) -> None:
    async with serving(saying(channel_tokenizer("<|channel|>"), "a")) as service:
        status, answer = await service.post(CHAT, {"messages": USER, **fields})
    assert status == 400
    assert answer["error"]["param"] == name
    assert "the prompt ends in the header of a message or in a call" in answer["error"]["message"]
