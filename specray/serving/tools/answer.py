"""Splits the text of an answer into content, reasoning and tool calls, as it arrives.

transformers' ``ResponseParser`` finds where regions begin and end in text that comes in pieces of any size;
what is inside a region of calls is read here, by the format's own reader. Malformed calls are content: nothing
that a model wrote is lost, and no answer fails because of it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Final

from specray.serving.tools.formats import MAX_CALL_LEN, ToolCall, ToolFormat
from specray.serving.tools.request import ToolMode, ToolUse

_ID_LEN: Final = 9
"""Characters of a call's id: what Mistral's chat templates insist on."""
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
REASONING_OPEN: Final = "<think>"
REASONING_CLOSE: Final = "</think>"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """One whole call of an answer."""

    index: int
    """Place of the call in its answer."""
    call_id: str
    call: ToolCall


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What an answer has gained."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class AnswerParser:
    """Reads one answer.

    Args:
        use: the request's tools; None: the answer has no calls.
        tool_format: how the model writes calls; None: calls are not read.
        reads_reasoning: text between ``<think>`` and ``</think>`` is reasoning.
        begins_in_reasoning: the prompt ended with ``<think>``.
    """

    def __init__(
        self,
        use: ToolUse | None,
        tool_format: ToolFormat | None,
        *,
        reads_reasoning: bool = False,
        begins_in_reasoning: bool = False,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        reads_calls = use is not None and tool_format is not None and use.mode is not ToolMode.NONE
        self._format = tool_format if reads_calls else None
        self._use = use
        self._schemas = {} if use is None else {tool.name: tool.parameters for tool in use.tools}
        self._num_calls = 0
        self._body = ""
        self._parser = ResponseParser(
            _template(self._format, reads_reasoning),
            prefix=REASONING_OPEN if reads_reasoning and begins_in_reasoning else "",
        )

    @property
    def num_calls(self) -> int:
        """Calls read so far."""
        return self._num_calls

    def push(self, text: str) -> AnswerDelta:
        """What more text brings; text that may begin a marker is held back."""
        return self._read(self._parser.feed(text))

    def finish(self) -> AnswerDelta:
        """What was held back."""
        return self._read(self._parser.finalize()[1])

    def _read(self, events: list[dict[str, Any]]) -> AnswerDelta:
        content, reasoning, calls = "", "", list[CallDelta]()
        for event in events:
            kind, field = event["type"], event["field"]
            if field == "calls":
                if kind == "region_open":
                    self._body = ""
                elif kind == "region_chunk":
                    self._body += event["text"]
                else:
                    rest, read = self._read_calls()
                    content += rest
                    calls += read
            elif kind == "region_chunk" and field == "reasoning":
                reasoning += event["text"]
            elif kind == "region_chunk":
                content += event["text"]
        return AnswerDelta(content, reasoning, tuple(calls))

    def _read_calls(self) -> tuple[str, list[CallDelta]]:
        """The calls of a region; or its text, as it was written, when they are malformed."""
        assert self._format is not None and self._use is not None
        try:
            if len(self._body) > MAX_CALL_LEN:
                raise ValueError("too long")
            calls = list(self._format.read(self._body, self._schemas))
            if not calls or any(call.name not in self._use.allowed for call in calls):
                raise ValueError("no call, or one of a tool that may not be called")
        except (ValueError, RecursionError):
            return self._format.opening + self._body + (self._format.close or ""), []
        first, self._num_calls = self._num_calls, self._num_calls + len(calls)
        return "", [CallDelta(first + place, make_call_id(), call) for place, call in enumerate(calls)]


def make_call_id() -> str:
    """A fresh id for one call."""
    return "".join(secrets.choice(_LETTERS) for _ in range(_ID_LEN))


def _template(tool_format: ToolFormat | None, reads_reasoning: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": {"content": "text", "content_args": {"strip": False}}}
    if reads_reasoning:
        fields["reasoning"] = {"open": REASONING_OPEN, "close": REASONING_CLOSE, "content": "text"}
    if tool_format is not None:
        fields["calls"] = {"open_pattern": tool_format.open_pattern, "repeats": True, "content": "text"}
        if tool_format.close is not None:
            fields["calls"]["close"] = tool_format.close
    # The anchor is never found: the whole prefix is what the parser has to know.
    return {"defaults": {}, "start_anchor": "\0", "fields": fields}
