"""Writes the answer of a chat as a message in blocks, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final

from specray.requests import FinishReason
from specray.serving.calls.chat_plan import Reading
from specray.serving.generation import Delta
from specray.serving.http.chat.format import ChatAnswer
from specray.serving.http.responses import Header, Json, Totals
from specray.serving.problems import anthropic_problem_body
from specray.serving.tools.answer import AnswerDelta, CallDelta
from specray.tokenization import Tokenizer

ID_PREFIX: Final = "msg_"


class MessageFormat:
    """Bodies and events of /v1/messages.

    Args:
        reading: how the answer is read.
        shows_thinking: False leaves the reasoning out.
    """

    ending: ClassVar[bytes] = b""
    waiting: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self, header: Header, tokenizer: Tokenizer, reading: Reading, *, shows_thinking: bool = True
    ) -> None:
        self._header = header
        self._answer = ChatAnswer(reading)
        self._shows_thinking = shows_thinking
        self._open_kind: str | None = None
        """Type of the block whose text may grow."""
        self._num_blocks = 0
        self._last: Delta | None = None
        """The delta that ended the answer."""

    def body(self, outputs: Sequence[Delta], totals: Totals) -> Json:
        content = list[Json]()
        for output in outputs:
            self._last = output
            content += (block for read in self._answer.read_in_order(output) for block in self._blocks(read))
        return {**self._message(totals), "content": content, **self._ending(), "usage": self._usage(totals)}

    def opening(self, num_choices: int, totals: Totals) -> Iterator[Json]:
        yield {"type": "message_start", "message": self._message(totals)}
        yield {"type": "ping"}

    def events(self, delta: Delta) -> Iterator[Json]:
        if delta.finish_reason is not None:
            self._last = delta
        for read in self._answer.read_in_order(delta):
            for call in read.continued:
                yield from self._grow_call(call)
            for block in self._texts(read):
                yield from self._grow(block)
            for call in read.begun:
                yield from self._grow_call(call)

    def closing(self, totals: Totals, *, includes_usage: bool, includes_metrics: bool) -> Iterable[Json]:
        yield from self._close()
        metrics = {"metrics": totals.metrics()} if includes_metrics else {}
        yield {"type": "message_delta", "delta": self._ending(), "usage": self._usage(totals), **metrics}
        yield {"type": "message_stop"}

    def failure(self, error: Exception) -> Json:
        return anthropic_problem_body(error, request_id=self._header.response_id)

    def _message(self, totals: Totals) -> Json:
        return {
            "id": self._header.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._header.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": totals.num_prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        }

    def _blocks(self, read: AnswerDelta) -> Iterator[Json]:
        yield from self._texts(read)
        for call in read.calls:
            yield _tool_use(call, json.loads(call.arguments))

    def _texts(self, read: AnswerDelta) -> Iterator[Json]:
        if read.reasoning and self._shows_thinking:
            yield {"type": "thinking", "thinking": read.reasoning, "signature": ""}
        if read.content:
            yield {"type": "text", "text": read.content}

    def _grow(self, block: Json) -> Iterator[Json]:
        kind = block["type"]
        if self._open_kind != kind:
            yield from self._open(kind, {**block, kind: ""})
        yield self._delta({"type": f"{kind}_delta", kind: block[kind]})

    def _grow_call(self, call: CallDelta) -> Iterator[Json]:
        if call.is_first:
            yield from self._open("tool_use", _tool_use(call, {}))
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, kind: str, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._open_kind = kind
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if self._open_kind is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._open_kind = None
            self._num_blocks += 1

    def _ending(self) -> Json:
        last = self._last
        sequence = last.stop_reason if last is not None and isinstance(last.stop_reason, str) else None
        if last is not None and last.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._answer.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, totals: Totals) -> Json:
        num_cached = sum(totals.num_cached_tokens.values())
        return {
            "input_tokens": totals.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": totals.num_output_tokens,
            "output_tokens_details": {"thinking_tokens": self._answer.num_reasoning_tokens},
        }


def _tool_use(call: CallDelta, value: Json) -> Json:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": value}
