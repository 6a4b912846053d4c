"""The two OpenAI endpoints: turns a decoded body into a call, and answers it whole or as a stream."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from specray.config.live import LiveConfig
from specray.requests import GenerateRequest
from specray.serving.admission.capacity import Admission
from specray.serving.admission.places import Place
from specray.serving.calls.chat_plan import Images, Reading
from specray.serving.calls.prepare import Asked, CallPreparer, PreparedCall
from specray.serving.calls.prompts import Prompt
from specray.serving.generation import Delta, complete, stream
from specray.serving.http.answers.completions import CompletionFormat, shown_prompt, without_output
from specray.serving.http.answers.rounds import RoundFormat
from specray.serving.http.answers.token_ids import TokenIds
from specray.serving.http.chat.format import ChatFormat
from specray.serving.http.chat.schema import ChatCompletionRequest
from specray.serving.http.edge.admission import Arrived
from specray.serving.http.events import StartedStream
from specray.serving.http.identity import Identity
from specray.serving.http.responses import ChunkFormat, Header, Json, ResponseFormat, Totals
from specray.serving.http.schemas import CompletionRequest, RequestT, SamplingFields, parse_request
from specray.serving.http.unknown import without_unknown
from specray.serving.observe import CallRecord
from specray.serving.problems import log_problem
from specray.tokenization import Tokenizer

logger = logging.getLogger(__name__)

LEFT_OUT_HEADER: Final = "X-Left-Out-Tools"
"""Names the tools of a request that are no functions, which the service cannot offer."""
_LINE_ENDS: Final = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}
"""What clients that split lines as ``str.splitlines`` does take for the end of an event's line, escaped. JSON
itself escapes the others, which are control characters of ASCII."""

FormatMaker = Callable[[Header, Tokenizer, Reading], ResponseFormat]


@dataclass(frozen=True, slots=True)
class Call:
    """One checked call: what to generate, and how to write the response."""

    response_id: str
    place: Place
    record: CallRecord
    requests: list[GenerateRequest]
    timeout_s: float
    """Seconds after which the routers are given up on."""
    format: ResponseFormat
    num_prompt_tokens: int
    num_choices: int
    """Choices per prompt."""
    is_stream: bool
    includes_usage: bool
    repeats_usage: bool
    includes_metrics: bool
    token_ids: TokenIds | None = None
    """Adds token ids to the answer; None: the call does not ask for them."""
    rounds: RoundFormat | None = None
    """Writes the rounds of a stream; None: the call does not ask for them."""
    hides_output: bool = False
    """The prompt alone is asked about."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the answer."""


class OpenAiApi:
    """Checks, runs and answers the calls of both endpoints.

    Args:
        now: returns seconds since 1970, for ``created``.

    Attributes:
        fingerprint: ``system_fingerprint`` of the next answers.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        tokenizer: Tokenizer,
        config: LiveConfig,
        calls: CallPreparer,
        identity: Identity,
    ) -> None:
        self._admission = admission
        self._config = config
        self._tokenizer = tokenizer
        self.calls = calls
        self.fingerprint = identity.system_fingerprint

    async def completion_call(self, arrived: Arrived, record: CallRecord) -> Call:
        def read() -> tuple[CompletionRequest, list[Prompt]]:
            body = self.parse(CompletionRequest, arrived.timed_values())
            return body, body.prompts()

        body, prompts = await self.calls.read(read, arrived.place)
        response_id = f"cmpl-{uuid.uuid4().hex}"
        prepared = await self.calls.prepare(_asked(body, prompts), arrived.place, request_id=response_id)
        if body.truncate_prompt_tokens is not None:
            prompts = [*prepared.prompts]  # What is echoed is the rest.
        num_choices = body.n or 1
        shown = [
            shown_prompt(
                prompt,
                token_ids,
                self._tokenizer,
                is_echoed=bool(body.echo),
                lists_logprobs=body.prompt_logprobs is not None,
            )
            for prompt, token_ids in zip(prompts, prepared.prompts, strict=True)
            for _ in range(num_choices)
        ]
        response_format = CompletionFormat(self._header(response_id, prepared), self._tokenizer, shown)
        call = self._call(body, prepared, response_id, response_format, arrived.place, record)
        return replace(call, hides_output=body.hides_output)

    async def chat_call(self, arrived: Arrived, record: CallRecord) -> Call:
        body = await self.calls.read(
            lambda: self.parse(ChatCompletionRequest, arrived.timed_values()), arrived.place
        )
        return await self.chat(body, arrived.place, record, prefix="chatcmpl-", make_format=ChatFormat)

    async def chat(
        self,
        body: ChatCompletionRequest,
        place: Place,
        record: CallRecord,
        *,
        prefix: str,
        make_format: FormatMaker,
    ) -> Call:
        """Makes the call of a chat, whatever API it came through.

        Args:
            prefix: begins the id of the answer.
            make_format: makes the writer of the answer.

        Raises:
            InvalidRequestError, EngineLostError: as for ``chat_call``.
        """
        response_id = f"{prefix}{uuid.uuid4().hex}"
        prepared = await self.calls.prepare(_asked(body, body), place, request_id=response_id)
        assert prepared.reading is not None, "it is a chat"
        header = self._header(response_id, prepared)
        chat_format = make_format(header, self._tokenizer, prepared.reading)
        call = self._call(body, prepared, response_id, chat_format, place, record)
        left_out = ", ".join(body.left_out_tools)
        if not left_out:
            return call
        logger.info(
            "tools left out, which are no functions: %s", left_out, extra={"request_id": call.response_id}
        )
        return replace(call, headers={LEFT_OUT_HEADER: left_out})

    @property
    def images(self) -> Images:
        return self._config.now.http.images

    def parse(self, schema: type[RequestT], values: object) -> RequestT:
        """Checks the types of a decoded body; the configuration says what becomes of unknown fields.

        Raises:
            InvalidRequestError: see ``parse_request``.
        """
        if self._config.now.http.unknown_fields == "ignore":
            values = without_unknown(schema, values)
        return parse_request(schema, values)

    async def encode_chat(self, body: ChatCompletionRequest, place: Place) -> tuple[int, ...]:
        """Returns the token ids of a conversation; refuses what a chat would refuse.

        Raises:
            InvalidRequestError: as for ``chat_call``.
        """
        await self.calls.options(_asked(body, body), place)
        return await self.calls.chat_tokens(body, place)

    async def answer(self, call: Call) -> Json:
        outputs = await complete(
            self._admission.routers,
            call.requests,
            self._tokenizer,
            timeout_s=call.timeout_s,
            entered=self._admission.entered,
        )
        totals = Totals(call.num_prompt_tokens, call.num_choices)
        if call.hides_output:
            outputs = [without_output(output) for output in outputs]
        for output in outputs:
            totals.add(output)
            call.record.observe(output)
        body = call.format.body(outputs, totals)
        if call.token_ids is not None:
            body = call.token_ids.add(body, outputs)
        return {**body, "metrics": totals.metrics()} if call.includes_metrics else body

    def started(self, call: Call) -> StartedStream:
        deltas = stream(
            self._admission.routers,
            call.requests,
            self._tokenizer,
            timeout_s=call.timeout_s,
            entered=self._admission.entered,
        )
        return StartedStream(deltas)

    async def events(self, call: Call, started: StartedStream) -> AsyncIterator[bytes]:
        """Yields the response as server-sent events; a failure becomes an event."""
        totals = Totals(call.num_prompt_tokens, call.num_choices)
        try:
            for opening in _with_ids(call, call.format.opening(len(call.requests), totals)):
                yield _event(_with_usage(call, opening, totals))
            while (delta := await started.next()) is not None:
                yield self._delta_event(call, totals, delta)
            closing = call.format.closing(
                totals, includes_usage=call.includes_usage, includes_metrics=call.includes_metrics
            )
            for event in closing:
                yield _event(event)
        except Exception as error:
            call.record.failed(error)
            log_problem(error, request_id=call.response_id)
            yield _event(call.format.failure(error))
        finally:
            await started.aclose()
        if call.format.ending:
            yield call.format.ending

    def _delta_event(self, call: Call, totals: Totals, delta: Delta) -> bytes:
        call.place.quota.answered(delta.index, is_last=delta.finish_reason is not None)
        if call.hides_output:
            delta = without_output(delta)
        totals.add(delta)
        call.record.observe(delta)
        events = _with_ids(call, call.format.events(delta), delta)
        told = [_event(_with_usage(call, event, totals)) for event in events]
        if call.rounds is not None and delta.rounds:
            told.insert(0, _event(call.rounds.event(delta)))
        return b"".join(told)

    def _call(
        self,
        body: SamplingFields,
        prepared: PreparedCall,
        response_id: str,
        response_format: ResponseFormat,
        place: Place,
        record: CallRecord,
    ) -> Call:
        requests, prompts, is_stream = prepared.requests, prepared.prompts, bool(body.stream)
        return Call(
            response_id=response_id,
            place=place,
            record=record,
            requests=record.describe(
                response_id,
                requests,
                tenant=requests[0].tenant,
                model=prepared.limits.model_name,
                is_stream=is_stream,
                choices_per_prompt=body.n or 1,
            ),
            timeout_s=prepared.timeout_s,
            format=response_format,
            num_prompt_tokens=sum(len(token_ids) for token_ids in prompts),
            num_choices=body.n or 1,
            is_stream=is_stream,
            includes_usage=body.includes_usage,
            repeats_usage=body.repeats_usage,
            includes_metrics=bool(body.return_speculation_metrics),
            rounds=(
                RoundFormat(self._tokenizer, response_format.summary())
                if body.includes_rounds and isinstance(response_format, ChunkFormat)
                else None
            ),
            token_ids=(
                TokenIds(prompts, num_choices=body.n or 1, is_chat=isinstance(body, ChatCompletionRequest))
                if body.return_token_ids
                else None
            ),
        )

    def _header(self, response_id: str, prepared: PreparedCall) -> Header:
        return Header(response_id, int(time.time()), prepared.limits.model_name, self.fingerprint)


def _asked(body: SamplingFields, prompts: Sequence[Prompt] | ChatCompletionRequest) -> Asked:
    return Asked(body.model, prompts, body.options, body.timeout_s, body.grammar_field)


def _with_ids(call: Call, events: Iterable[Json], delta: Delta | None = None) -> Iterable[Json]:
    return events if call.token_ids is None else call.token_ids.add_to_events(events, delta)


def _with_usage(call: Call, event: Json, totals: Totals) -> Json:
    """Adds usage to an event: the counts so far, or null where usage comes last."""
    if not call.includes_usage:
        return event
    return {**event, "usage": totals.usage_so_far() if call.repeats_usage else None}


def _event(values: Json) -> bytes:
    name = f"event: {values['type']}\n" if "type" in values else ""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return f"{name}data: {text}\n\n".encode()
