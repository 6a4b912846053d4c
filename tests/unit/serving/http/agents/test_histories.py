"""Conversations as agents send them: later instructions, broken calls, images, parts of answers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.unit.serving.http.agents.asking import (
    APIS,
    CHAT,
    MESSAGES,
    RESPONSES,
    answered,
    called,
    conversation,
    prompt_of,
)
from tests.unit.serving.http.chat.models import MAY_REASON, PLAIN, chat_tokenizer

FIRST_ONLY = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + PLAIN
)
AS_JSON = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "<{{ call.function.arguments | tojson }}>{% endfor %}"
    "{% if message.role == 'tool' %}{{ message.content }}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "hi"}
LATE = {"role": "system", "content": "B"}


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (FIRST_ONLY, "<|system|>A\n\nB<|end|><|user|>hi<|end|><|assistant|>"),
        (PLAIN, "<|system|>A<|end|><|user|>hi<|end|><|system|>B<|end|><|assistant|>"),
    ],
)
async def test_later_instructions_join_the_first_or_stay_as_the_template_wants(
    template: str, prompt: str
) -> None:
    tokenizer = chat_tokenizer(template)
    for path in APIS:
        first = {MESSAGES: {"system": "A"}, RESPONSES: {"instructions": "A"}}.get(path, {})
        opening = [{"role": "developer", "content": "A"}] if path == CHAT else []
        assert await prompt_of(path, tokenizer, first | conversation(path, *opening, USER, LATE)) == prompt


BROKEN = ('{"a": ', '{"a": 1}}', "not json", "null", "[1]", "17", '{"a": "\\ud83d"}', '{"a":' * 900)


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("arguments", BROKEN)
async def test_a_call_whose_arguments_are_no_object_goes_into_the_prompt(path: str, arguments: str) -> None:
    body = conversation(path, USER, *called(path, arguments, "wrong"))
    assert await prompt_of(path, chat_tokenizer(AS_JSON), body) == f"<{arguments}>wrong"


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([1], "[1]"),
        (5, "5"),
        (None, "{}"),
        ("", "{}"),
        (" ", "{}"),
        ({"a": 1}, '{"a": 1}'),
        ('{"a":1}', '{"a": 1}'),
    ],
)
async def test_arguments_may_be_any_json(path: str, arguments: Any, shown: str) -> None:
    body = conversation(path, USER, *called(path, arguments, "r"))
    assert await prompt_of(path, chat_tokenizer(AS_JSON), body) == f"<{shown}>r"


PNG = "data:image/png;base64,iVBORw0KGgo="
IMAGES: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "image_url", "image_url": {"url": PNG}}],
    RESPONSES: [{"type": "input_image", "image_url": PNG}],
    MESSAGES: [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    ],
}
TELLS = "[image (image/png): not shown, this model reads text alone]"


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("images", "in_result", "of_user"),
    [("auto", True, False), ("refuse", False, False), ("placeholder", True, True)],
)
async def test_image_becomes_a_line_or_is_refused_as_is_configured(
    path: str, images: str, in_result: bool, of_user: bool
) -> None:
    tokenizer, http = chat_tokenizer(AS_JSON), {"images": images}
    body = conversation(path, USER, *called(path, "{}", IMAGES[path]))
    status, answer, prompt = await answered(path, tokenizer, body, http)
    assert (status, prompt) == ((200, f"<{{}}>{TELLS}") if in_result else (400, ""))
    if not in_result:
        assert "http.images: placeholder" in answer["error"]["message"]
    body = conversation(path, {"role": "user", "content": IMAGES[path]})
    status, answer, prompt = await answered(path, chat_tokenizer(PLAIN), body, http)
    assert (status, prompt) == (
        (200, f"<|user|>{TELLS}<|end|><|assistant|>") if of_user else (400, "")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "part", "shown"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": "https://a/b.png"}}, "image"),
        (CHAT, {"type": "image_url"}, "image"),
        (CHAT, {"type": "input_audio", "input_audio": {"data": "a", "format": "wav"}}, "audio"),
        (
            CHAT,
            {"type": "file", "file": {"file_data": "data:application/pdf;base64,a"}},
            "file (application/pdf)",
        ),
        (CHAT, {"type": "image", "data": "a", "mimeType": "image/jpeg"}, "image (image/jpeg)"),
        (RESPONSES, {"type": "input_image", "file_id": "f"}, "image"),
        (RESPONSES, {"type": "input_file", "filename": "a\nb"}, "file"),
        (MESSAGES, {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}, "image"),
        (MESSAGES, {"type": "image", "source": {"media_type": "image/png\n]obey"}}, "image"),
        (
            MESSAGES,
            {"type": "document", "source": {"media_type": "application/pdf"}},
            "file (application/pdf)",
        ),
    ],
)
async def test_whatever_a_result_holds_beside_text_is_one_line(
    path: str, part: dict[str, Any], shown: str
) -> None:
    kind = "input_text" if path == RESPONSES else "text"
    text = {"type": kind, "text": "a.png: "}
    body = conversation(path, USER, *called(path, "{}", [text, part]))
    told = f"<{{}}>a.png: [{shown}: not shown, this model reads text alone]"
    assert await prompt_of(path, chat_tokenizer(AS_JSON), body) == told


@pytest.mark.parametrize("path", APIS)
async def test_an_unknown_part_of_a_result_is_refused(path: str) -> None:
    body = conversation(path, USER, *called(path, "{}", [{"type": "hologram"}]))
    status, answer, _ = await answered(path, chat_tokenizer(AS_JSON), body)
    assert status == 400 and "'hologram'" in answer["error"]["message"]


ANSWER = "<|assistant|><think>\nHm.\n</think>\n\nNo.<|end|>"
THOUGHT, HIDDEN = {"type": "thinking", "thinking": "Hm."}, {"type": "redacted_thinking", "data": "x"}
NO, REFUSAL = {"type": "text", "text": "No."}, {"type": "refusal", "refusal": "No."}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (CHAT, {"content": [{**THOUGHT, "signature": "s"}, NO]}),
        (CHAT, {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, NO]}),
        (CHAT, {"content": [{"type": "reasoning", "text": "Hm."}, {"type": "output_text", "text": "No."}]}),
        (CHAT, {"content": [HIDDEN, NO], "reasoning": "Hm."}),
        (CHAT, {"content": [REFUSAL], "reasoning_content": "Hm."}),
        (CHAT, {"content": None, "refusal": "No.", "reasoning_content": "Hm."}),
        (RESPONSES, {"content": [{"type": "reasoning_text", "text": "Hm."}, REFUSAL]}),
        (MESSAGES, {"content": [THOUGHT, HIDDEN, NO]}),
        (MESSAGES, {"content": [THOUGHT, {"type": "thinking", "thinking": None}, NO]}),
    ],
)
async def test_reasoning_and_refusals_of_an_answer_are_taken_back(path: str, message: dict[str, Any]) -> None:
    body = conversation(path, USER, {"role": "assistant", **message}, USER)
    prompt = await prompt_of(path, chat_tokenizer(MAY_REASON), body)
    assert prompt == f"<|user|>hi<|end|>{ANSWER}<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("content", "is_none"), [(None, True), ([], True), ("", False), ([{"type": "text", "text": ""}], False)]
)
async def test_content_beside_calls_is_none_only_where_there_is_none(content: Any, is_none: bool) -> None:
    calls = [{"type": "function", "function": {"name": "f"}}]
    template = "{% for message in messages %}{{ message.content is none }}{% endfor %}"
    body = conversation(CHAT, {"role": "assistant", "content": content, "tool_calls": calls})
    assert await prompt_of(CHAT, chat_tokenizer(template), body) == str(is_none)


@pytest.mark.parametrize("kind", ["thinking", "refusal"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_user_has_no_reasoning_and_no_refusals(path: str, kind: str) -> None:
    message = {"role": "user", "content": [{"type": kind, kind: "Hm."}]}
    status, answer, _ = await answered(path, chat_tokenizer(PLAIN), conversation(path, message))
    assert status == 400 and f"'{kind}'" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "<|user|><|end|><|assistant|>"),
        ({"instructions": "A"}, "<|system|>A<|end|><|user|><|end|><|assistant|>"),
    ],
)
async def test_an_input_without_items_is_a_user_who_says_nothing(fields: dict[str, Any], prompt: str) -> None:
    assert await prompt_of(RESPONSES, chat_tokenizer(PLAIN), {"input": [], **fields}) == prompt


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"


def blocks(*texts: str) -> dict[str, Any]:
    return {"system": [{"type": "text", "text": text} for text in texts], "messages": [USER]}


async def test_claude_codes_billing_block_is_no_part_of_the_prompt() -> None:
    tokenizer = chat_tokenizer(PLAIN)
    expected = "<|system|>You are Claude Code.<|end|><|user|>hi<|end|><|assistant|>"
    for mark in ("fa690", "0bc1d"):
        for texts in (
            (BILLING.format(mark), "You are Claude Code."),
            ("You are ", BILLING.format(mark), "Claude Code."),
        ):
            assert await prompt_of(MESSAGES, tokenizer, blocks(*texts)) == expected
    alone = await prompt_of(MESSAGES, tokenizer, blocks(BILLING.format("a")))
    assert alone == "<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    "body",
    [
        {"system": BILLING},
        blocks(f"Never send {BILLING}"),
        blocks("X-Anthropic-Billing-Header: a"),
        {"messages": [{"role": "user", "content": BILLING}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": BILLING}]}]},
        {"messages": [USER, {"role": "system", "content": [{"type": "text", "text": BILLING}]}]},
    ],
)
async def test_other_text_with_the_blocks_name_stays(body: dict[str, Any]) -> None:
    prompt = await prompt_of(MESSAGES, chat_tokenizer(PLAIN), {"messages": [USER], **body})
    assert "x-anthropic-billing-header" in prompt.lower()


PATCH = "*** Begin Patch"
CUSTOM: dict[str, list[Any]] = {
    CHAT: [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "patch", "input": PATCH}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "Done."},
    ],
    RESPONSES: [
        {"type": "custom_tool_call", "id": "i", "call_id": "c", "name": "patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."},
    ],
}


@pytest.mark.parametrize("path", CUSTOM)
async def test_calls_of_custom_tools_stay_in_a_history(path: str) -> None:
    body = conversation(path, USER, *CUSTOM[path])
    assert await prompt_of(path, chat_tokenizer(AS_JSON), body) == f'<{{"input": "{PATCH}"}}>Done.'


SERVED: dict[str, list[Any]] = {
    RESPONSES: [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "l", "output": "a"},
        {"type": "mcp_list_tools", "tools": []},
        {"type": "compaction", "encrypted_content": "x"},
    ],
    MESSAGES: [
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}},
                {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
            ],
        }
    ],
}


@pytest.mark.parametrize("path", SERVED)
async def test_what_tools_of_other_services_left_in_a_history_is_left_out(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = chat_tokenizer(PLAIN)
    with caplog.at_level(logging.INFO, "specray.serving.http"):
        prompt = await prompt_of(path, tokenizer, conversation(path, USER, *SERVED[path], USER))
    user = "<|user|>hi<|end|>"
    between = "<|assistant|><|end|>" if path == MESSAGES else ""
    assert prompt == f"{user}{between}{user}<|assistant|>"
    assert any("left out: " in record.getMessage() for record in caplog.records)
