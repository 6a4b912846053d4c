"""Splits the text of an answer into content, reasoning and tool calls, as it arrives.

Outside of calls, markers say where reasoning and calls begin; from there on the format's own reader reads.
What turns out to be no call is text: nothing that a model wrote is lost, and no answer fails because of it.
Whitespace around reasoning and between calls is part of the format.

A stream has the arguments of calls as they are written; then a call that breaks off is a call with the
arguments so far. Elsewhere it is text. That is the only difference, since one reader reads both.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import regex

from specray.serving.tools.formats import MakeReader, ToolFormat
from specray.serving.tools.reader import CallPart, CallPlace, CallReader
from specray.serving.tools.request import ToolMode, ToolUse

REASONING_OPEN: Final = "<think>"
REASONING_CLOSE: Final = "</think>"


@dataclass(frozen=True, slots=True)
class CallDelta:
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
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    @property
    def continued(self) -> Iterator[CallDelta]:
        """The part of a call that had begun before; it comes ahead of all else."""
        return (call for call in self.calls if not call.is_first)

    @property
    def begun(self) -> Iterator[CallDelta]:
        """Calls that begin; they come after the text."""
        return (call for call in self.calls if call.is_first)


@dataclass(slots=True)
class Gained:
    """Collects what an answer gains."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)

    def delta(self) -> AnswerDelta:
        return AnswerDelta("".join(self.content), "".join(self.reasoning), tuple(self.calls))


class AnswerParser:
    """Reads one answer.

    Args:
        use: the request's tools; None: the answer has no calls.
        tool_format: how the model writes calls; None: calls are not read.
        reads_reasoning: text between ``<think>`` and ``</think>`` is reasoning. Calls are read there, too.
        begins_in_reasoning: the prompt ended with ``<think>``.
        tells_parts: calls are given in parts, as they are written.
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
        self._tells_parts = tells_parts
        starts = () if self._format is None else self._format.starts
        self._outside = _Markers((*starts, REASONING_OPEN) if reads_reasoning else starts)
        self._inside = _Markers((*starts, REASONING_CLOSE))
        self._in_reasoning = reads_reasoning and begins_in_reasoning
        self._text = ""
        """What was not read yet."""
        self._marker = ""
        """Text with which the reader began."""
        self._reader: CallReader | None = None
        """None: outside of calls."""
        self._others: list[MakeReader] = []
        """Make readers of other forms that have not tried what the reader reads."""
        self._call: _OpenCall | None = None
        """The call that is read."""
        self._num_calls = 0
        self._call_ids: set[str] = set()
        self._at_start = True
        """Nothing but whitespace and reasoning has come."""
        self._has_ended = False
        self._content = _Trimmed()
        self._reasoning = _Trimmed(trims_start=reads_reasoning)
        self._gained = Gained()

    @property
    def num_calls(self) -> int:
        return self._num_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as the text so far tells."""
        return self._in_reasoning and self._reader is None

    @property
    def is_apart(self) -> bool:
        return self.is_reasoning

    def push(self, text: str, token_id: int | None = None) -> AnswerDelta:
        self._text += text
        return self._read()

    def finish(self) -> AnswerDelta:
        self._has_ended = True
        self._read_all()
        if not self._num_calls:
            self._gained.content.append(self._content.finish())
        return self._read()

    def _read(self) -> AnswerDelta:
        self._read_all()
        gained, self._gained = self._gained, Gained()
        return gained.delta()

    def _read_all(self) -> None:
        reads_on = True
        while reads_on and (self._text or (self._has_ended and self._reader is not None)):
            reads_on = self._read_text() if self._reader is None else self._read_calls(self._reader)

    def _read_text(self) -> bool:
        """Reads text outside of calls, up to where a call may begin. False: more text decides."""
        markers = self._inside if self._in_reasoning else self._outside
        start = len(self._text) - len(self._text.lstrip())
        bare = "" if self._format is None or self._in_reasoning or not self._at_start else self._format.bare
        if bare and self._text.startswith(bare, start):
            end, marker = start, bare
        else:
            end, marker = markers.find(self._text, is_whole=self._has_ended)
        self._add(self._text[:end])
        self._text = self._text[end:]
        if not marker:
            return False
        if marker in (REASONING_OPEN, REASONING_CLOSE):
            self._text = self._text[len(marker) :]
            self._in_reasoning = marker == REASONING_OPEN
            self._reasoning = _Trimmed(trims_start=True)
            self._content.trims_start = self._content.trims_start or not self._in_reasoning
            return True
        assert self._format is not None and self._use is not None
        self._marker = marker
        self._reader = self._format.reader(self._schemas, self._use.allowed)
        self._others = list(self._format.others)
        return True

    def _add(self, text: str) -> None:
        self._at_start = self._at_start and (self._in_reasoning or not text.strip())
        if self._in_reasoning:
            self._gained.reasoning.append(self._reasoning.push(text))
        else:
            self._gained.content.append(self._content.push(text))
            if self._format is None:
                self._gained.content.append(self._content.finish())

    def _read_calls(self, reader: CallReader) -> bool:
        """Reads calls, up to where none follows. False: more text decides."""
        assert self._use is not None
        text, self._text = self._text, ""
        self._tell(reader.push(text))
        if self._has_ended:
            self._tell(reader.finish())
        if not self._has_ended and reader.place not in (CallPlace.END, CallPlace.LOST):
            return False
        self._reader, self._text = None, reader.rest
        if self._call is not None:
            self._add("" if self._call.is_told else reader.raw)
            self._call = None
        elif reader.place is CallPlace.LOST and not reader.num_calls and self._others:
            self._text = reader.raw + self._text
            self._reader = self._others.pop()(self._schemas, self._use.allowed)
            return True
        elif reader.place is not CallPlace.END:
            self._text = reader.raw + self._text
            if not reader.num_calls:
                self._give_back(len(self._marker))
        if reader.place not in (CallPlace.END, CallPlace.LOST):
            # The end of the answer leaves no doubt that this is no other call.
            self._give_back(len(self._text))
        return True

    def _give_back(self, length: int) -> None:
        self._add(self._text[:length])
        self._text = self._text[length:]

    def _tell(self, parts: Iterable[CallPart]) -> None:
        assert self._use is not None
        for part in parts:
            if part.is_first:
                is_wanted = self._use.is_parallel or not self._num_calls
                is_new = bool(part.call_id) and part.call_id not in self._call_ids
                call_id = part.call_id if is_new else make_call_id()
                self._call_ids.add(call_id)
                self._call = _OpenCall(call_id, is_wanted, is_wanted and self._tells_parts)
            assert self._call is not None, "the first part comes first"
            call = self._call
            call.arguments.append(part.arguments)
            if part.is_first if call.is_told else part.is_last:
                self._at_start = False
                (self._reasoning if self._in_reasoning else self._content).drop()
                self._num_calls += call.is_wanted
            if call.is_told:
                self._gained.calls.append(self._delta(part.name, part.arguments, part.is_first, part.is_last))
            elif part.is_last and call.is_wanted:
                self._gained.calls.append(self._delta(part.name, "".join(call.arguments), True, True))
            if part.is_last:
                self._call = None

    def _delta(self, name: str, arguments: str, is_first: bool, is_last: bool) -> CallDelta:
        assert self._call is not None
        return CallDelta(self._num_calls - 1, self._call.call_id, name, arguments, is_first, is_last)


@dataclass(slots=True)
class _OpenCall:
    call_id: str
    is_wanted: bool
    """It is not one too many."""
    is_told: bool
    """It is given in parts."""
    arguments: list[str] = field(default_factory=list)


class _Markers:
    """Texts that are looked for in text that comes in pieces."""

    def __init__(self, markers: Collection[str]) -> None:
        self._markers = markers
        self._pattern = regex.compile("|".join(map(regex.escape, markers)) or r"\b\B")

    def find(self, text: str, *, is_whole: bool) -> tuple[int, str]:
        """Where the first marker begins, and it; empty: there is none before what may become one.

        Args:
            is_whole: no more text comes.
        """
        found = self._pattern.search(text, partial=not is_whole)
        if found is None:
            return len(text), ""
        return found.start(), "" if found.partial else found[0]


class _Trimmed:
    """Text that comes in pieces, without the whitespace at its end and, if wanted, at its start."""

    def __init__(self, *, trims_start: bool = False) -> None:
        self.trims_start = trims_start
        self._held = ""

    def push(self, text: str) -> str:
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
        told, self._held = self._held, ""
        return told

    def drop(self) -> None:
        """Forgets the whitespace that was held back."""
        self._held = ""


def make_call_id() -> str:
    """A fresh id for one call."""
    # Characters of a call's id: what Mistral's chat templates insist on.
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
