"""Response bodies of the chat completions API, whole and as events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from specray.requests import FinishReason
from specray.serving.calls.chat_plan import Reading
from specray.serving.generation import Delta
from specray.serving.http.responses import (
    ChunkFormat,
    Header,
    Json,
    Totals,
    finite,
    listed_prompt_logprobs,
)
from specray.serving.tools.answer import AnswerDelta, CallDelta, Gained
from specray.tokenization import Tokenizer
from specray.types import TokenLogprobs


class ChatFormat(ChunkFormat):
    """Bodies of /v1/chat/completions.

    Args:
        reading: how answers are read.
    """

    def __init__(self, header: Header, tokenizer: Tokenizer, reading: Reading) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._reading = reading
        self._answers: dict[int, ChatAnswer] = {}

    def body(self, outputs: Sequence[Delta], totals: Totals) -> Json:
        choices = [self._choice(delta) for delta in outputs]
        body = {**self._header.fields("chat.completion"), "choices": choices, "usage": self.usage(totals)}
        if outputs and outputs[0].prompt_logprobs:
            body["prompt_logprobs"] = listed_prompt_logprobs(self._tokenizer, outputs[0].prompt_logprobs)
        return body

    def opening(self, num_choices: int, totals: Totals) -> Iterable[Json]:
        # Content stays null where an answer is nothing but calls.
        content = None if self._reading.reads_calls else ""
        for index in range(num_choices):
            yield self._event(index, {"role": "assistant", "content": content})

    def events(self, delta: Delta) -> Iterator[Json]:
        """Yields text and calls, and in an event of its own the end: clients drop text that comes with it."""
        answer = self._answer(delta.index)
        changes = list(_changes(answer.read(delta)))
        if delta.logprobs and not changes:
            changes = [{}]
        for place, change in enumerate(changes):
            yield self._event(delta.index, change, logprobs=delta.logprobs if place == 0 else ())
        if delta.finish_reason is not None:
            yield self._event(delta.index, {}, ending=answer.ending(delta))

    def summary(self) -> Json:
        return {**self._header.fields("chat.completion.chunk"), "choices": []}

    def usage(self, totals: Totals) -> Json:
        usage = totals.usage()
        if not self._reading.reads_reasoning:
            return usage
        num_tokens = sum(answer.num_reasoning_tokens for answer in self._answers.values())
        details = {"reasoning_tokens": num_tokens, **usage.get("completion_tokens_details", {})}
        return {**usage, "completion_tokens_details": details}

    def _answer(self, index: int) -> ChatAnswer:
        return self._answers.setdefault(index, ChatAnswer(self._reading))

    def _choice(self, delta: Delta) -> Json:
        answer = self._answer(delta.index)
        read = answer.read(delta)
        message: Json = {"role": "assistant", "content": read.content, "refusal": None}
        if read.reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            message["content"] = read.content or None
            message["tool_calls"] = [_call(delta) for delta in read.calls]
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta.logprobs),
            **answer.ending(delta),
        }

    def _event(
        self, index: int, change: Json, *, logprobs: Sequence[TokenLogprobs] = (), ending: Json | None = None
    ) -> Json:
        choice = {
            "index": index,
            "delta": change,
            "logprobs": self._logprobs(logprobs),
            **(ending or {"finish_reason": None, "stop_reason": None}),
        }
        return {**self.summary(), "choices": [choice]}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> Json | None:
        content = [logprob_entry(self._tokenizer, entry) for entry in entries]
        return {"content": content, "refusal": None} if entries else None


class ChatAnswer:
    """One choice as far as it has been read."""

    def __init__(self, reading: Reading) -> None:
        self._parser = reading.parser()
        self._is_named = reading.is_named
        self.num_reasoning_tokens = 0
        self.is_apart = False
        """The latest token was no part of the text: it was of the reasoning, or began or ended a message."""

    def read(self, delta: Delta) -> AnswerDelta:
        runs = self.read_in_order(delta)
        return Gained(
            [run.content for run in runs],
            [run.reasoning for run in runs],
            [call for run in runs for call in run.calls],
        ).delta()

    def read_in_order(self, delta: Delta) -> list[AnswerDelta]:
        """What a delta brings, in parts whose reasoning comes before their content, and that before calls."""
        if self._parser is None:
            return [AnswerDelta(content=delta.text)]
        runs = [_Run()]
        for place, piece in enumerate(delta.pieces):
            was_reasoning, was_apart = self._parser.is_reasoning, self._parser.is_apart
            token_id = delta.token_ids[place] if place < len(delta.token_ids) else None
            _add(runs, self._parser.push(piece, token_id))
            self.is_apart = was_apart or self._parser.is_apart
            if token_id is not None and (was_reasoning or self._parser.is_reasoning):
                self.num_reasoning_tokens += 1
        if delta.finish_reason is not None:
            _add(runs, self._parser.finish())
        return [run.delta() for run in runs]

    @property
    def has_calls(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    def ending(self, delta: Delta) -> Json:
        """Why the answer ended; after its last delta has been read."""
        reason: str | None = delta.finish_reason
        if self.has_calls and delta.finish_reason is FinishReason.STOP and not self._is_named:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": delta.stop_reason}


class _Run(Gained):
    """Pieces of an answer in which reasoning, content and calls come in this order."""

    def is_followed_by(self, part: AnswerDelta) -> bool:
        has_content, has_calls = bool(self.content), bool(self.calls)
        return not ((part.reasoning and (has_content or has_calls)) or (part.content and has_calls))

    def add(self, part: AnswerDelta) -> None:
        self.content += [part.content] if part.content else []
        self.reasoning += [part.reasoning] if part.reasoning else []
        for call in part.calls:
            if call.is_first:
                self.calls.append(call)
                continue
            last = self.calls.pop() if self.calls else replace(call, arguments="")
            arguments = last.arguments + call.arguments
            self.calls.append(replace(last, arguments=arguments, is_last=call.is_last))


def _add(runs: list[_Run], part: AnswerDelta) -> None:
    if not runs[-1].is_followed_by(part):
        runs.append(_Run())
    runs[-1].add(part)


def logprob_entry(tokenizer: Tokenizer, entry: TokenLogprobs) -> Json:
    tops = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    return {
        **_token(tokenizer, entry.token_id, entry.logprob),
        "top_logprobs": [_token(tokenizer, token_id, logprob) for token_id, logprob in tops],
    }


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _changes(read: AnswerDelta) -> Iterator[Json]:
    if read.reasoning:
        yield {"reasoning_content": read.reasoning}
    if read.content:
        yield {"content": read.content}
    for delta in read.calls:
        if delta.is_first:
            opening = {**_call(delta), "function": {"name": delta.name, "arguments": ""}}
            yield {"tool_calls": [{"index": delta.index, **opening}]}
        if delta.arguments:
            yield {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}


def _call(delta: CallDelta) -> Json:
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"id": delta.call_id, "type": "function", "function": function}
