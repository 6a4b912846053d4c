"""Writes the answer of a chat as a response, whole and as events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from specray.requests import FinishReason
from specray.serving.calls.chat_plan import Reading
from specray.serving.generation import Delta
from specray.serving.http.chat.format import ChatAnswer, logprob_entry
from specray.serving.http.responses import Header, Json, Totals
from specray.serving.http.responses_api.output import Output
from specray.serving.http.responses_api.schema import ResponsesRequest
from specray.serving.problems import problem_body, problem_status
from specray.serving.tools.request import is_no_function
from specray.tokenization import Tokenizer

ID_PREFIX: Final = "resp_"
_ERROR_CODES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's codes of errors in a stream, by HTTP status; others are server_error."""


class ResponseObjectFormat:
    """Bodies and events of /v1/responses.

    Args:
        request: what was asked; some of it comes back.
        reading: how the answer is read.
    """

    ending: ClassVar[bytes] = b""
    waiting: ClassVar[bytes] = b": waiting\n\n"

    def __init__(
        self, request: ResponsesRequest, header: Header, tokenizer: Tokenizer, reading: Reading
    ) -> None:
        self._request = request
        self._header = header
        self._tokenizer = tokenizer
        self._answer = ChatAnswer(reading)
        self._output = Output(header.response_id.removeprefix(ID_PREFIX))
        self._finish_reason: FinishReason | None = None
        self._num_events = 0

    def body(self, outputs: Sequence[Delta], totals: Totals) -> Json:
        for output in outputs:
            list(self.events(output))
        list(self._output.end(is_complete=self._is_complete))
        return self._response(self._status, totals)

    def opening(self, num_choices: int, totals: Totals) -> Iterator[Json]:
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered({"type": kind, "response": self._response("in_progress")})

    def events(self, delta: Delta) -> Iterator[Json]:
        self._finish_reason = delta.finish_reason or self._finish_reason
        for part in _by_token(delta):
            reads = self._answer.read_in_order(part)
            has_text = any(read.content for read in reads) or not self._answer.is_apart
            logprobs = [logprob_entry(self._tokenizer, entry) for entry in part.logprobs if has_text]
            for read in reads:
                yield from map(self._numbered, self._output.add(read, logprobs))
                logprobs = []

    def closing(self, totals: Totals, *, includes_usage: bool, includes_metrics: bool) -> Iterable[Json]:
        yield from map(self._numbered, self._output.end(is_complete=self._is_complete))
        response = self._response(self._status, totals)
        if includes_metrics:
            response["metrics"] = totals.metrics()
        yield self._numbered({"type": f"response.{self._status}", "response": response})

    def failure(self, error: Exception) -> Json:
        code = _ERROR_CODES.get(problem_status(error), "server_error")
        problem = {"code": code, "message": problem_body(error)["error"]["message"]}
        list(self._output.close(is_complete=False))
        response = {**self._response("failed"), "error": problem}
        return self._numbered({"type": "response.failed", "response": response})

    @property
    def _is_complete(self) -> bool:
        return self._finish_reason is not FinishReason.LENGTH

    @property
    def _status(self) -> str:
        return "completed" if self._is_complete else "incomplete"

    def _numbered(self, event: Json) -> Json:
        number, self._num_events = self._num_events, self._num_events + 1
        return {**event, "sequence_number": number}

    def _response(self, status: str, totals: Totals | None = None) -> Json:
        request = self._request
        form = None if request.text is None else request.text.format
        verbosity = None if request.text is None else request.text.verbosity
        return {
            "id": self._header.response_id,
            "object": "response",
            "created_at": self._header.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self._header.model,
            "output": self._output.items if status != "in_progress" else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "system_fingerprint": self._header.system_fingerprint,
            "temperature": request.temperature,
            "text": {"format": form or {"type": "text"}, "verbosity": verbosity},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": [tool for tool in request.tools or [] if not is_no_function(tool)],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if totals is None else self._usage(totals),
        }

    def _usage(self, totals: Totals) -> Json:
        usage = totals.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._answer.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _by_token(delta: Delta) -> Iterator[Delta]:
    """The delta, where it has logprobs token by token, so that each is told with its own text."""
    if not delta.logprobs:
        yield delta
        return
    last = len(delta.pieces) - 1
    for place, piece in enumerate(delta.pieces):
        yield replace(
            delta,
            text=piece,
            pieces=(piece,),
            token_ids=delta.token_ids[place : place + 1],
            logprobs=delta.logprobs[place : place + 1],
            finish_reason=delta.finish_reason if place == last else None,
        )
