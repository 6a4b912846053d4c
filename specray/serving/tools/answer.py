"""Splits the text of an answer into content, reasoning and tool calls, as it arrives.

Where regions begin and end is found by ``tokenization.regions``; what is inside a region of calls is read
here, by the format's own reader. Malformed calls are content: nothing that a model wrote is lost, and no
answer fails because of it. Whitespace around reasoning and between calls is part of the format.

In a stream the arguments of calls are told as they are written; then a call that breaks off is a call with
the arguments so far.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from specray.serving.tools.call_stream import CallPart, CallReader, CallStream
from specray.serving.tools.formats import MAX_CALL_LEN, ToolCall, ToolFormat
from specray.serving.tools.parameter_stream import ParameterStream
from specray.serving.tools.python_stream import PythonStream, read_python_calls
from specray.serving.tools.request import ToolMode, ToolUse
from specray.tokenization.regions import Region, RegionEvent, RegionParser

_ID_LEN: Final = 9
"""Characters of a call's id: what Mistral's chat templates insist on."""
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
REASONING_OPEN: Final = "<think>"
REASONING_CLOSE: Final = "</think>"
_CALLS: Final = "calls"
_REASONING: Final = "reasoning"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What one call of an answer has gained; all of it where neither part is missing."""

    index: int
    """Place of the call in its answer."""
    call_id: str
    name: str
    arguments: str
    """JSON text, or the part of it that has come."""
    is_first: bool = True
    is_last: bool = True
    """The arguments are complete. A call that breaks off has no last part."""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What an answer has gained."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    @property
    def continued(self) -> Iterator[CallDelta]:
        """The part of a call that had begun before; it comes ahead of all else."""
        return (call for call in self.calls if not call.is_first)

    @property
    def begun(self) -> Iterator[CallDelta]:
        """Calls that begin; they come behind the text."""
        return (call for call in self.calls if call.is_first)


class AnswerParser:
    """Reads one answer.

    Args:
        use: the request's tools; None: the answer has no calls.
        tool_format: how the model writes calls; None: calls are not read.
        reads_reasoning: text between ``<think>`` and ``</think>`` is reasoning.
        begins_in_reasoning: the prompt ended with ``<think>``.
        tells_parts: calls are told in parts, as they are written.
    """

    def __init__(
        self,
        use: ToolUse | None,
        tool_format: ToolFormat | None,
        *,
        reads_reasoning: bool = False,
        begins_in_reasoning: bool = False,
        tells_parts: bool = False,
    ) -> None:
        reads_calls = use is not None and tool_format is not None and use.mode is not ToolMode.NONE
        self._format = tool_format if reads_calls else None
        self._use = use
        self._schemas = {} if use is None else {tool.name: tool.parameters for tool in use.tools}
        self._num_calls = 0
        self._body = ""
        self._tells_parts = tells_parts
        self._stream: CallReader | None = None
        """The region's calls as they are told in parts; None: outside, or they are told whole."""
        self._call_id = ""
        self._has_ended = False
        self._content = _Trimmed()
        self._reasoning = _Trimmed(trims_start=reads_reasoning)
        self._parser = RegionParser(
            _regions(self._format, reads_reasoning),
            prefix=REASONING_OPEN if reads_reasoning and begins_in_reasoning else "",
        )

    @property
    def num_calls(self) -> int:
        """Calls read so far."""
        return self._num_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as the text so far tells."""
        return self._parser.region == _REASONING

    @property
    def is_apart(self) -> bool:
        """Whether what comes next is no part of the text."""
        return self.is_reasoning

    def push(self, text: str, token_id: int | None = None) -> AnswerDelta:
        """What more text brings; text that may begin a marker is held back."""
        return self._read(self._parser.push(text))

    def finish(self) -> AnswerDelta:
        """What was held back."""
        self._has_ended = True
        delta = self._read(self._parser.finish())
        return replace(delta, content=delta.content + ("" if self._num_calls else self._content.finish()))

    def _read(self, events: list[RegionEvent]) -> AnswerDelta:
        content, reasoning, calls = "", "", list[CallDelta]()
        for event in events:
            if event.region == _CALLS and event.is_end:
                rest, read = self._read_calls()
                content += self._content.push(rest)
                calls += read
            elif event.region == _CALLS:
                calls += self._parts(event.text)
            elif event.region == _REASONING and event.is_end:
                self._reasoning = _Trimmed(trims_start=True)
                self._content.trims_start = True
            elif event.region == _REASONING:
                reasoning += self._reasoning.push(event.text)
            elif self._format is None:
                content += self._content.push(event.text) + self._content.finish()
            else:
                content += self._content.push(event.text)
        return AnswerDelta(content, reasoning, tuple(calls))

    def _parts(self, text: str) -> Iterator[CallDelta]:
        """What more text of a region tells of its calls before the region ends."""
        self._stream = self._stream or self._make_stream()
        if self._stream is None:
            self._body += text
            return
        yield from self._deltas(self._stream.push(text))

    def _make_stream(self) -> CallReader | None:
        """What reads a region's calls while they are written; None: they are told whole."""
        assert self._format is not None and self._use is not None
        if not self._tells_parts:
            return None
        limit = self._limit
        if self._format.writes_parameters:
            return ParameterStream(self._schemas, self._use.allowed, limit)
        if self._format.writes_python:
            return PythonStream(self._use.allowed, limit)
        return None if self._format.head is None else CallStream(self._format.head, self._use.allowed, limit)

    @property
    def _limit(self) -> int | None:
        """Calls that may still come; None: any number."""
        return None if self._use is None or self._use.is_parallel else 1 - min(self._num_calls, 1)

    def _deltas(self, parts: Iterator[CallPart]) -> Iterator[CallDelta]:
        for part in parts:
            if part.is_first:
                self._content.drop()
                self._num_calls += 1
                self._call_id = make_call_id()
            yield CallDelta(
                self._num_calls - 1, self._call_id, part.name, part.arguments, part.is_first, part.is_last
            )

    def _read_calls(self) -> tuple[str, list[CallDelta]]:
        """The calls of a region that has ended, but those that were told; or its text when they are none."""
        assert self._format is not None and self._use is not None
        (body, self._body), (stream, self._stream) = (self._body, ""), (self._stream, None)
        if self._format.read is None:
            return self._read_python(body, stream)
        opening, unread = self._format.opening, body
        ends = [] if stream is None else list(self._deltas(stream.finish()))
        if stream is not None:
            body = unread = stream.rest
            if stream.num_calls:
                left = self._format.tail.match(body)
                unread = body[left.end() if left else 0 :].rstrip("] \t\r\n")
                if not unread:
                    return "", ends
                opening = ""
        try:
            if len(body) > MAX_CALL_LEN or (stream is not None and stream.is_in_call):
                raise ValueError("too long, or no call")
            calls = list(self._format.read(unread, self._schemas))
            if not calls or any(call.name not in self._use.allowed for call in calls):
                raise ValueError("no call, or one of a tool that may not be called")
        except (ValueError, RecursionError):
            close = "" if self._has_ended else self._format.close or ""
            return opening + body + close, []
        return "", self._whole(calls[: self._limit])

    def _read_python(self, body: str, stream: CallReader | None) -> tuple[str, list[CallDelta]]:
        """The same for calls written as Python: complete ones stay calls, whatever is behind them."""
        assert self._format is not None and self._use is not None
        if stream is not None:
            return ("" if stream.num_calls else self._format.opening) + stream.rest, []
        calls, rest = read_python_calls(body, self._use.allowed, self._limit)
        return ("" if calls else self._format.opening) + rest, self._whole(calls)

    def _whole(self, calls: list[ToolCall]) -> list[CallDelta]:
        """Calls that are told whole."""
        if calls:
            self._content.drop()
        first, self._num_calls = self._num_calls, self._num_calls + len(calls)
        return [
            CallDelta(first + place, make_call_id(), call.name, call.arguments)
            for place, call in enumerate(calls)
        ]


class _Trimmed:
    """Text that comes in pieces, without the whitespace at its end and, if wanted, at its start."""

    def __init__(self, *, trims_start: bool = False) -> None:
        self.trims_start = trims_start
        self._held = ""

    def push(self, text: str) -> str:
        """What can be told now; whitespace waits for what follows."""
        if self.trims_start:
            text = text.lstrip()
            self.trims_start = not text
        told = text.rstrip()
        if not told:
            self._held += text
            return ""
        told, self._held = self._held + told, text[len(told) :]
        return told

    def finish(self) -> str:
        """The whitespace that was held back."""
        told, self._held = self._held, ""
        return told

    def drop(self) -> None:
        """Forgets the whitespace that was held back."""
        self._held = ""


def make_call_id() -> str:
    """A fresh id for one call."""
    return "".join(secrets.choice(_LETTERS) for _ in range(_ID_LEN))


def _regions(tool_format: ToolFormat | None, reads_reasoning: bool) -> dict[str, Region]:
    regions: dict[str, Region] = {}
    if reads_reasoning:
        regions[_REASONING] = Region(REASONING_OPEN, REASONING_CLOSE)
    if tool_format is not None:
        regions[_CALLS] = Region(tool_format.open_pattern, tool_format.close, is_pattern=True)
    return regions
