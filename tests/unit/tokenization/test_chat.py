"""Chat templates: what they are given, and text of users that must not become control tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import Unigram

from specray.errors import ConfigError, InvalidRequestError
from specray.tokenization import ChatMessage, ChatOptions, Tokenizer, load_tokenizer
from specray.tokenization.chat import ChatTemplate
from specray.tokenization.control_tokens import ControlTokens
from tests.unit.tokenization.tiny_tokenizer import (
    sentencepiece_tokenizer,
    tiny_backend,
    tiny_tokenizer,
    write_tiny_tokenizer,
)

CALL = {"id": "call_abcdef", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "now"}}
CONTENT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def rendered(template: str, *messages: ChatMessage, **options: Any) -> str:
    return tiny_tokenizer(chat_template=template).rendered(messages, ChatOptions(**options)).text


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def test_arguments_are_an_object_or_text_as_the_template_wants() -> None:
    message = ChatMessage("assistant", None, {"tool_calls": [CALL]})
    arguments = "messages[0].tool_calls[0].function.arguments"
    assert rendered("{{ " + arguments + ".a }}", message) == "1"
    assert rendered("{{ " + arguments + " | tojson }}", message) == '{"a": 1}'
    assert rendered("{{ 'x' + " + arguments + " }}", message) == 'x{"a": 1}'


def test_missing_content_is_empty_unless_the_template_asks_for_none() -> None:
    message = ChatMessage("assistant", None, {"tool_calls": [CALL]})
    assert rendered("[{{ messages[0]['content'] }}]", message) == "[]"
    for test in ("['content'] is none", ".content is not none", "['content'] == None"):
        shown = rendered("{{ messages[0]" + test + " }}", message)
        assert shown == ("False" if "not" in test else "True")


def test_reasoning_that_may_be_none_says_nothing_of_content() -> None:
    template = "{% if messages[0].reasoning_content is not none %}{{ 'a' in messages[0].content }}{% endif %}"
    assert rendered(template, ChatMessage("assistant", None, {"tool_calls": [CALL]})) == "False"


def test_missing_content_is_empty_where_the_template_asks_and_cannot_do_without() -> None:
    template = (
        "{% if messages[0]['content'] is none %}{{ messages[0]['content'] | length }}{% endif %}"
        "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    )
    broken = {"type": "function", "function": {"name": "now", "arguments": '{"a": '}}
    assert (
        rendered(template, ChatMessage("assistant", None, {"tool_calls": [CALL, broken]})) == '{"a": 1}{"a": '
    )


def test_ids_are_shortened_for_a_template_that_insists_on_it() -> None:
    call = ChatMessage("assistant", None, {"tool_calls": [CALL]})
    result = ChatMessage("tool", "x", {"tool_call_id": "call_abcdef"})
    ids = "{{ messages[0].tool_calls[0].id }} {{ messages[1].tool_call_id }}"
    assert rendered(ids, call, result) == "call_abcdef call_abcdef"
    check = "{% if messages[0].tool_calls[0].id|length != 9 %}{{ raise_exception('9') }}{% endif %}"
    first, second = rendered(check + ids, call, result).split()
    assert first == second and len(first) == 9
    own = ChatMessage("assistant", None, {"tool_calls": [{**CALL, "id": "abcDEF123"}]})
    assert rendered(check + "{{ messages[0].tool_calls[0].id }}", own) == "abcDEF123"


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        (
            "{% for tool in tools or [] %}{% if loop.first %}{% continue %}{% endif %}{{ tool }}{% endfor %}",
            True,
        ),
        ("{% generation %}{{ tools }}{% endgeneration %}", True),
        ("no tools, {# tools #} {{ 'tools' }} {{ messages[0].tools }}", False),
        ("{% set tools = [] %}{{ tools }}", False),
    ],
)
def test_template_that_ignores_tools_is_known(template: str, reads: bool) -> None:
    found = tiny_tokenizer(chat_template=template).chat_template
    assert found is not None and found.reads_tools is reads


@pytest.mark.parametrize("is_verbatim", [True, False])
def test_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path, is_verbatim: bool) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    kind = {} if is_verbatim else {"tokenizer_class": "PreTrainedTokenizerFast"}
    loaded = load_tokenizer(write_tiny_tokenizer(tmp_path, chat_template=templates, **kind))
    assert loaded.rendered([user("a")]).text == "plain"
    assert loaded.rendered([user("a")], ChatOptions(tools=[TOOL, TOOL])).text == "2"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "eos_token"])
def test_variable_with_a_taken_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        rendered(CONTENT, user("a"), variables={name: "x"})
    assert caught.value.field == f"chat_template_kwargs.{name}"


def test_text_goes_on_within_the_last_message() -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    assert rendered(template, user("a"), user("b"), continues_final_message=True) == "[a][b"
    with pytest.raises(InvalidRequestError) as caught:
        rendered("{{ messages[0].content }}", user("a"), user("b"), continues_final_message=True)
    assert caught.value.field == "messages" and len(str(caught.value)) < 300


CONTROL = {"<s>": 0, "</s>": 1, "<<a>": 2, "<a>>": 3}


def pieces(text: str) -> list[str]:
    """Pieces in which a marked text is encoded."""
    tokens = ControlTokens(CONTROL)
    return tokens.pieces(tokens.marked(text))


@pytest.mark.parametrize(
    "text",
    ["<s>", "a<s>b</s>", "<s><s>", "<s</s>>", "<<a>>", "<<<a>>>", "<<s>a>", "\ufdd0<s>", "<\ufdd1s>", "</s"],
)
def test_no_piece_holds_a_control_token_and_no_character_is_lost(text: str) -> None:
    assert not [piece for piece in pieces(text) if any(token in piece for token in CONTROL)]
    assert "".join(pieces(text)) == text.replace("\ufdd0", "").replace("\ufdd1", "")


def test_text_without_control_tokens_is_one_piece() -> None:
    assert pieces("a < s > b </ s>") == ["a < s > b </ s>"]
    assert pieces("") == []


@pytest.mark.parametrize(
    "template",
    [
        CONTENT,
        "{{ messages | tojson }}",
        "{{ messages[0].content | trim }}",
        "{{ messages[0].content.split('<s>')[-1] }}{{ messages[0].content[:3] }}",
        "{{ messages[0].content | replace('x', '') }}",
        "{{ messages[0].content.split('x') | join }}",
    ],
)
@pytest.mark.parametrize("text", ["<s>", " </s> ", "a<s></s>b", "<s>x</s>"])
def test_no_template_makes_a_control_token_of_text(template: str, text: str) -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ bos_token }}" + template)
    token_ids = tokenizer.encode_chat([user(text)])
    assert [token_id for token_id in token_ids if tokenizer.is_special(token_id)] == [0]
    plain = tiny_tokenizer(chat_template=template)
    assert "".join(map(plain.token_text, token_ids[1:])) == plain.rendered([user(text)]).text


def test_template_finds_what_it_looks_for_in_text() -> None:
    template = "{{ '<s>' in messages[0].content }} {{ messages[0].content.split('<s>') | length }}"
    assert rendered(template, user("a<s>b")) == "True 2"


def test_marks_survive_a_template_that_escapes_them() -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ messages[0].content | tojson(ensure_ascii=True) }}")
    token_ids = tokenizer.encode_chat([user("a<s>")])
    assert not any(map(tokenizer.is_special, token_ids))
    assert tokenizer.decode(token_ids) == '"a<s>"'


def test_control_tokens_may_be_allowed() -> None:
    tokenizer = tiny_tokenizer(chat_template=CONTENT)
    assert tokenizer.encode_chat([user("<s>")], ChatOptions(allows_special_tokens=True)) == (0,)


def test_character_that_a_normalizer_turns_into_a_control_token_is_refused() -> None:
    backend = tiny_backend()
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=True)])
    tokenizer = Tokenizer(backend, chat_template=CONTENT + "<|end|>")
    assert tokenizer.encode_chat([user("a")])[-1] == tokenizer.added_token_id("<|end|>")
    with pytest.raises(InvalidRequestError, match="control token"):
        tokenizer.encode_chat([user("\uff1c|end|>")])


def test_piece_of_a_vocabulary_with_marks_for_spaces_gets_no_space() -> None:
    pieces = ["<unk>", "\u2581", "\n", "a", "\u2581a", "<", "s", ">", "<s>"]
    backend = Backend(Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer = Tokenizer(backend, chat_template=CONTENT)
    token_ids = tokenizer.encode_chat([user("a<s>a a")])
    assert tokenizer.token_strings(token_ids) == ["\u2581a", "<", "s", ">", "a", "\u2581a"]
    assert tokenizer.decode(token_ids) == "a<s>a a"


def test_piece_of_a_vocabulary_that_knows_no_line_end_is_not_lost() -> None:
    tokenizer = sentencepiece_tokenizer(chat_template=CONTENT)
    token_ids = tokenizer.encode_chat([user("My<s>name")])
    assert tokenizer.token_strings(token_ids)[-1] == "\u2581name"


def test_added_token_that_the_template_writes_is_a_control_token() -> None:
    backend = tiny_backend()
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("hello", special=False)])
    tokenizer = Tokenizer(backend, chat_template="{# <tool_call> hello #}" + CONTENT)
    token_ids = tokenizer.encode_chat([user("<tool_call>x")])
    assert tokenizer.added_token_id("<tool_call>") not in token_ids
    other = Tokenizer(backend, chat_template=CONTENT)
    assert other.added_token_id("<tool_call>") in other.encode_chat([user("<tool_call>x")])


def spelling_tokenizer(is_byte_level: bool) -> Tokenizer:
    make = tiny_tokenizer if is_byte_level else sentencepiece_tokenizer
    return make(chat_template="{{ bos_token }}" + CONTENT)


@pytest.mark.parametrize("is_byte_level", [True, False])
@pytest.mark.parametrize("text", ["<s></s>", "a <s> b</s> c", "<s><s> \u00e9</s>\n", "  <s>\u3042</s>x"])
def test_pieces_have_the_tokens_that_each_has_alone(is_byte_level: bool, text: str) -> None:
    tokenizer = spelling_tokenizer(is_byte_level)
    chat = tokenizer.rendered([user(text)], ChatOptions())
    assert len(chat.pieces) > 1
    first, *others = chat.pieces
    alone = [*tokenizer.encode(first, add_special_tokens=False)]
    alone += [token_id for piece in others for token_id in tokenizer.encode_inner(piece)]
    assert list(tokenizer.encode_rendered(chat)) == alone


@pytest.mark.parametrize(("is_byte_level", "most"), [(True, 4), (False, 8)])
def test_text_that_spells_control_tokens_is_not_encoded_token_by_token(
    monkeypatch: pytest.MonkeyPatch, is_byte_level: bool, most: int
) -> None:
    tokenizer = spelling_tokenizer(is_byte_level)
    calls, encode = list[str](), tokenizer.encode

    def counted(text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        calls.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", counted)
    assert len(tokenizer.encode_chat([user("<s>" * 1000)])) > 1000
    assert len(calls) <= most


@pytest.mark.parametrize(("length", "least"), [(0, 0), (1, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_least_tokens_are_those_of_the_longest_token(length: int, least: int) -> None:
    backend = tiny_backend()
    backend.add_tokens([AddedToken("a" * 5)])
    assert Tokenizer(backend).longest_token_len == 5
    assert Tokenizer(backend).least_tokens("a" * length) == least


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}"


def test_template_that_does_not_end_is_ended_and_the_next_rendering_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specray.tokenization.chat.MAX_RENDER_S", 0.1)
    monkeypatch.setattr("specray.tokenization.templates.probes.MAX_RENDER_S", 0.1)
    template = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    with pytest.raises(InvalidRequestError, match=r"messages: .* did not end within 0\.1 s"):
        rendered(template, user("loop"))
    assert rendered(template, user("hi")) == "hi"


def test_template_beyond_all_sizes_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="the chat template has 1000001 characters; allowed: at most 1000000"
    ):
        rendered("x" * 1_000_001, user("hi"))


def test_template_that_cannot_be_parsed_reads_no_tools() -> None:
    for template in ("{% if %}", "{{ (" + "(" * 5000):
        assert not ChatTemplate(template, {}).reads_tools
