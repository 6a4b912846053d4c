"""What is ready before the first chat, and templates that do not like the chat of the warm-up."""

from __future__ import annotations

import logging

import pytest

from specray.serving.warmup import warm_up
from tests.unit.tokenization.tiny_tokenizer import tiny_tokenizer

TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0]['content'] }}", "{{ raise_exception('no') }}", None],
    ids=["rendered", "refused", "no template"],
)
def test_warm_up_ends_and_says_nothing(template: str | None, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer(chat_template=template)
    with caplog.at_level(logging.WARNING, "specray"):
        thread = warm_up(tokenizer)
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert caplog.records == []


def test_warm_up_names_the_ends_of_an_output(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ messages[-1]['content'] }}<s>")
    with caplog.at_level(logging.INFO, "specray"):
        warm_up(tokenizer).join(TIMEOUT_S)
    assert [record.getMessage() for record in caplog.records] == ["outputs end at <s> (0), </s> (1)"]


@pytest.mark.parametrize(
    ("words", "level", "message"),
    [
        ("<tool_call><arg_key>", logging.INFO, "calls of tools are read in the format glm45"),
        ("<|tool_call>call:name", logging.WARNING, "its format of calls is not known: calls stay text"),
    ],
)
def test_warm_up_says_how_calls_are_read(
    words: str, level: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% if tools %}{{ tools }}" + words + "{% endif %}{{ messages[0]['content'] }}"
    with caplog.at_level(logging.INFO, "specray"):
        warm_up(tiny_tokenizer(chat_template=template)).join(TIMEOUT_S)
    record = caplog.records[-1]
    assert record.levelno == level and message in record.getMessage()


def test_warm_up_has_rendered_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = []
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(tokenizer, "encode_chat", lambda messages: rendered.append(messages))
    warm_up(tokenizer).join(TIMEOUT_S)
    assert len(rendered) == 1
