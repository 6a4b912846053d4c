"""What a chat template takes and writes: ends of turns, system messages, tools without a description."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from specray.tokenization import ChatMessage, ChatOptions, Tokenizer
from tests.unit.tokenization.tiny_tokenizer import EOS, tiny_backend, tiny_tokenizer, write_tiny_tokenizer

LOOP = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
TURNS = LOOP.replace("{% endfor %}", "<|im_end|>\n{% endfor %}")
THOUGHT = (
    "{% for message in messages %}{{ message.thinking }}<|im_end|>{{ message.content }}{% endfor %}"
    "{% set messages = messages[1:] %}"
)
"""A token that ends reasoning, too."""
CALL = "<|im_end|>{{ message.tool_calls[0].function.name if message.tool_calls }}<|stop|>"
"""A token that also stands before a call."""
FIRST_ONLY = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
)
DROPS = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    "{% for message in messages if message.role != 'system' %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
)
TOOLS = "{% for tool in tools or [] %}{% set function = tool.function %}"
KEEPS = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def with_turns(template: str | None, *names: str) -> Tokenizer:
    """A tokenizer whose special tokens have these names, with ids from 264 on."""
    backend = tiny_backend()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    return Tokenizer(backend, chat_template=template, eos_token_ids=[EOS])


@pytest.mark.parametrize(
    ("template", "names", "ends"),
    [
        (TURNS, ("<|im_end|>", "<|user|>"), ["</s>", "<|im_end|>"]),
        (TURNS, ("<|im", "<|im_end|>"), ["</s>", "<|im_end|>"]),
        (TURNS.replace("<|im_end|>", " \n<|im_end|>"), ("<|im_end|>",), ["</s>", "<|im_end|>"]),
        ("{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}", (), ["</s>"]),
        (LOOP, ("<|user|>", "<|assistant|>"), ["</s>"]),
        (THOUGHT + TURNS, ("<|im_end|>",), ["</s>"]),
        (
            THOUGHT + TURNS.replace("<|im_end|>", "<|im_end|> <|stop|>"),
            ("<|im_end|>", "<|stop|>"),
            ["</s>", "<|stop|>"],
        ),
        (TURNS.replace("<|im_end|>", CALL), ("<|im_end|>", "<|stop|>"), ["</s>", "<|stop|>"]),
        (TURNS.replace("<|im_end|>", "</answer><|im_end|>"), ("<|im_end|>",), ["</s>"]),
        ("{{ raise_exception('no') }}", ("<|im_end|>",), ["</s>"]),
        ("{{", ("<|im_end|>",), ["</s>"]),
        (None, ("<|im_end|>",), ["</s>"]),
    ],
)
def test_end_of_the_templates_turn_ends_an_output(
    template: str | None, names: tuple[str, ...], ends: list[str]
) -> None:
    tokenizer = with_turns(template, *names)
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids] == ends


@pytest.mark.parametrize("beside", [("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>"), ()])
def test_end_of_a_part_of_an_answer_does_not_end_it(beside: tuple[str, ...]) -> None:
    tokenizer = with_turns(TURNS.replace("<|im_end|>", "<|end|>"), "<|end|>", *beside)
    assert ("<|end|>" in tokenizer.named_ends()) is not bool(beside)
    assert all(name in tokenizer.named_ends() for name in beside)


def test_end_of_a_part_does_not_end_an_answer_though_it_is_listed() -> None:
    backend = tiny_backend()
    names = ("<|end|>", "<|return|>", "<|call|>")
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    listed = [backend.token_to_id("<|end|>"), backend.token_to_id("<|return|>")]
    ends = Tokenizer(backend, eos_token_ids=listed).eos_token_ids
    assert ends == (backend.token_to_id("<|return|>"), backend.token_to_id("<|call|>"))


def test_ends_are_named_in_one_line() -> None:
    assert with_turns(TURNS, "<|im_end|>").named_ends() == "</s> (1), <|im_end|> (264)"


@pytest.mark.slow
def test_ends_are_found_without_transformers(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template="{% for m in messages %}{{ m.content }}<s>{% endfor %}")
    code = (
        "import sys; from specray.tokenization import load_tokenizer; "
        f"assert load_tokenizer({str(tmp_path)!r}).eos_token_ids == (0, 1); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def system(text: str) -> ChatMessage:
    return ChatMessage("system", text)


A, B, HI, YES = system("A"), system("B"), ChatMessage("user", "hi"), ChatMessage("assistant", "yes")


@pytest.mark.parametrize("template", [FIRST_ONLY, DROPS])
@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([A, B, HI], "[system]A\n\nB[user]hi"),
        ([A, HI, B], "[system]A\n\nB[user]hi"),
        ([HI, A], "[system]A[user]hi"),
        ([HI, YES, A, HI, B, YES], "[system]A\n\nB[user]hi[assistant]yes[user]hi[assistant]yes"),
        ([A, HI, system("")], "[system]A[user]hi"),
        ([A, A, HI], "[system]A\n\nA[user]hi"),
        ([A, HI], "[system]A[user]hi"),
        ([HI], "[user]hi"),
    ],
)
def test_later_system_messages_join_the_first_where_the_template_takes_one(
    template: str, messages: list[ChatMessage], text: str
) -> None:
    assert tiny_tokenizer(chat_template=template).rendered(messages).text == text


def test_system_messages_stay_where_they_are_where_the_template_does_not_mind() -> None:
    shown = tiny_tokenizer(chat_template=KEEPS).rendered([HI, A, B, YES]).text
    assert shown == "[user]hi[system]A[system]B[assistant]yes"


BARE: dict[str, Any] = {"name": "now"}


@pytest.mark.parametrize("function", [BARE, {**BARE, "description": None}])
def test_a_tool_without_a_description_has_an_empty_one_where_the_template_reads_it(
    function: dict[str, Any],
) -> None:
    options = ChatOptions(tools=[{"type": "function", "function": function}])
    adds = TOOLS + "{{ '// ' + function.description + function.name }}{% endfor %}"
    assert tiny_tokenizer(chat_template=adds).rendered([HI], options).text == "// now"


def test_a_tool_without_parameters_has_empty_ones_where_the_template_reads_them() -> None:
    options = ChatOptions(tools=[{"type": "function", "function": BARE}])
    lists = TOOLS + "{{ function.parameters.properties.items() | list }}{% endfor %}"
    assert tiny_tokenizer(chat_template=lists).rendered([HI], options).text == "[]"


def test_a_tool_is_shown_as_it_is_where_the_template_does_not_mind() -> None:
    options = ChatOptions(tools=[{"type": "function", "function": BARE}])
    dumps = TOOLS + "{{ function | tojson }}{% endfor %}"
    assert tiny_tokenizer(chat_template=dumps).rendered([HI], options).text == '{"name": "now"}'


def history(*arguments: Any) -> list[ChatMessage]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": value}} for value in arguments]
    return [HI, ChatMessage("assistant", None, {"tool_calls": calls})]


CALLS = "{% for message in messages %}{% for call in message.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"
AS_JSON = CALLS + "<{{ call.function.arguments | tojson }}>" + END
AS_TEXT = CALLS + "{{ '<' + call.function.arguments + '>' }}" + END
AS_ITEMS = CALLS + "<{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}>" + END
IF_MAPPING = CALLS + (
    "<{% if call.function.arguments is mapping %}"
    "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endif %}>"
) + END  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ['{"a": ', '{"a": 1}}', "not json", "[1]", "17", '{"a": "\\ud83d"}', "null", '"x"', "</s>\\\n\ufffd"],
)
def test_arguments_that_are_no_object_go_into_the_prompt_as_they_are(text: str) -> None:
    for template in (AS_JSON, AS_TEXT):
        assert tiny_tokenizer(chat_template=template).rendered(history(text)).text == f"<{text}>"
    for template in (AS_ITEMS, IF_MAPPING):
        wrapped = "<>" if text == "null" else f"<arguments={text}>"
        assert tiny_tokenizer(chat_template=template).rendered(history(text)).text == wrapped


def test_calls_beside_a_broken_one_stay_as_they_are() -> None:
    arguments = ({"a": 1}, '{"b": ', {"c": 2}, "[")
    for template, text in (
        (AS_JSON, '<{"a": 1}><{"b": ><{"c": 2}><[>'),
        (AS_TEXT, '<{"a": 1}><{"b": ><{"c": 2}><[>'),
        (AS_ITEMS, '<a=1><arguments={"b": ><c=2><arguments=[>'),
    ):
        assert tiny_tokenizer(chat_template=template).rendered(history(*arguments)).text == text


def test_broken_arguments_do_not_spell_control_tokens() -> None:
    tokenizer = tiny_tokenizer(chat_template=AS_JSON)
    token_ids = tokenizer.encode_chat(history("{</s>"))
    assert EOS not in token_ids and tokenizer.decode(token_ids) == "<{</s>>"


def test_a_template_that_shows_no_calls_renders_a_history_with_broken_ones() -> None:
    assert tiny_tokenizer(chat_template=KEEPS).rendered(history("[")).text == "[user]hi[assistant]"
