"""The public gRPC service: runs its calls with the same checks and the same router as the HTTP ingress."""

from __future__ import annotations

import copy
import dataclasses
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from specray.config import Config
from specray.config.live import LiveConfig
from specray.errors import DeadlineExceededError, InvalidRequestError
from specray.grammar import PreparedCompiler
from specray.interfaces import RouterClient
from specray.request_options import given_options
from specray.requests import GenerateRequest, ServiceInfo
from specray.rpc.inference.messages import MESSAGE_TIMEOUT_S, PlainCall
from specray.rpc.inference.server import InferenceServer
from specray.rpc.inference.types import (
    AdmittedCall,
    Admitter,
    GenerateEvent,
    GenerateParams,
    Incoming,
    InferenceHandler,
    TokenUsage,
)
from specray.rpc.status import status_of
from specray.serving.admission.api_keys import Caller, Keyring
from specray.serving.admission.capacity import Admission
from specray.serving.admission.places import Place
from specray.serving.calls.limits import ServiceLimits
from specray.serving.calls.prepare import Asked, CallPreparer, read_in_turn
from specray.serving.calls.prompts import Prompt
from specray.serving.generation import Delta, close, stream
from specray.serving.grpc.chat import read_chat
from specray.serving.http.schemas import DEFAULT_MAX_TOKENS
from specray.serving.models.catalog import PlacedHandler
from specray.serving.observe import CallObserver, CallRecord
from specray.serving.readiness import ReadyStatus
from specray.serving.validation import RANGES, GenerationOptions
from specray.telemetry.conventions import operation_attributes, rpc_attributes
from specray.tokenization import Tokenizer

ParamsT = TypeVar("ParamsT")


class GrpcIngress:
    """rpc.inference.InferenceHandler in front of a RouterClient, for one call, or for anybody's."""

    def __init__(
        self,
        *,
        client: RouterClient | Admission,
        tokenizer: Tokenizer,
        config: Config | LiveConfig,
        observer: CallObserver | None = None,
        compiler: PreparedCompiler | None = None,
    ) -> None:
        live = LiveConfig.of(config)
        config = live.now
        self._observer = observer or CallObserver(config.logging)
        self._admission = Admission.of(client, config)
        self._tokenizer = tokenizer
        self.limits = ServiceLimits(self._admission.routers, tokenizer, live)
        self._calls = CallPreparer(
            admission=self._admission,
            tokenizer=tokenizer,
            config=live,
            limits=self.limits,
            compiler=compiler or PreparedCompiler.of(tokenizer),
        )
        self._model_name = config.model_name
        self._place: Place | None = None

    def admitter(self, keyring: Keyring) -> Admitter:
        """Returns the function that lets calls in by their metadata, and gives each its place."""
        return admitter(self, keyring, self._admission, lambda: self.limits.max_chat_bytes)

    def at(self, place: Place) -> GrpcIngress:
        """The handler of the call that has this place."""
        handler = copy.copy(self)
        handler._place = place
        return handler

    async def generate(self, params: GenerateParams) -> AsyncGenerator[GenerateEvent, None]:
        """See rpc.inference.InferenceHandler."""
        operation = "chat" if params.messages else "text_completion"
        record = self._observer.begin(
            "grpc",
            "Generate",
            client_request_id=params.client_request_id,
            traceparent=params.traceparent,
            attributes={
                **rpc_attributes("Generate"),
                **operation_attributes(operation),
            },
        )
        record.operation = operation
        with self._observed(record), self._entered() as place:
            request, deltas = await self._started(params, place, record)
            try:
                async for delta in deltas:
                    place.quota.answered(0, is_last=delta.finish_reason is not None)
                    record.observe(delta)
                    yield _event(request, delta, record.num_output_tokens)
            finally:
                await close(deltas)

    async def _started(
        self, params: GenerateParams, place: Place, record: CallRecord
    ) -> tuple[GenerateRequest, AsyncIterator[Delta]]:
        chat = await self._calls.read(partial(read_chat, params), place)
        asked = Asked(
            params.model,
            [_prompt(params)] if chat is None else chat,
            partial(generation_options, params),
            None if params.timeout_s is None else _within_range(params.timeout_s),
        )
        prepared = await self._calls.prepare(asked, place, request_id=f"grpc-{uuid.uuid4().hex}")
        (request,) = prepared.requests
        requests = record.describe(
            request.request_id,
            [request],
            tenant=request.tenant,
            model=prepared.limits.model_name,
            is_stream=True,
        )
        return request, stream(
            self._admission.routers,
            requests,
            self._tokenizer,
            timeout_s=prepared.timeout_s,
            entered=self._admission.entered,
        )

    def _entered(self) -> AbstractContextManager[Place]:
        """The call's place; where nobody was asked for a key, one of its own."""
        return self._admission.places.arrive(Caller()) if self._place is None else nullcontext(self._place)

    async def info(self) -> ServiceInfo:
        """See rpc.inference.InferenceHandler."""
        with self._observed(self._observer.begin("grpc", "Info")):
            return dataclasses.replace(await self.limits.info(), model=self._model_name)

    def refused(self, method: str, error: Exception) -> None:
        """See rpc.inference_types.Refused."""
        record = self._observer.begin("grpc", method)
        record.failed(error)
        self._observer.end(record, status_of(error, logs=False).code.name)

    @contextmanager
    def _observed(self, record: CallRecord) -> Iterator[None]:
        code = "CANCELLED"
        try:
            yield
            code = "OK"
        except Exception as error:
            record.failed(error)
            code = status_of(error, logs=False).code.name
            raise
        finally:
            self._observer.end(record, code)


def admitter(
    handler: PlacedHandler, keyring: Keyring, admission: Admission, max_bytes: Callable[[], int]
) -> Admitter:
    """Returns the function that lets calls in by their metadata, and gives each its place.

    Args:
        max_bytes: returns the bytes of the longest message.
    """

    @contextmanager
    def admit(call: Incoming) -> Iterator[AdmittedCall]:
        caller = keyring.identify(call.authorization)
        if call.method != "Generate":
            yield PlainCall(handler)
            return
        with admission.places.arrive(caller) as place:
            if call.timeout_s is not None:
                place.limit(_within_range(call.timeout_s))
            yield _Entered(handler.at(place), place, admission, max_bytes)

    return admit


@dataclass(frozen=True, slots=True)
class _Entered:
    """rpc.inference_types.AdmittedCall of a call that has a place."""

    handler: InferenceHandler
    place: Place
    admission: Admission
    max_bytes: Callable[[], int]

    async def receive(self, message: Awaitable[bytes], decode: Callable[[bytes], ParamsT]) -> ParamsT:
        """See rpc.inference_types.AdmittedCall."""
        try:
            data = await self.place.receive(message, grace_s=MESSAGE_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineExceededError("the call's message came too slowly") from None
        self.place.hold(len(data))
        if len(data) > (most := self.max_bytes()):
            raise InvalidRequestError(f"the message has {len(data)} bytes; allowed: {most}")
        self.place.begin()
        return await read_in_turn(partial(decode, data), self.place, self.admission)


@asynccontextmanager
async def served(server: InferenceServer, client: RouterClient, *, grace_s: float) -> AsyncIterator[None]:
    """Serves while the block runs, and then finishes calls under way for at most ``grace_s`` seconds.

    The health service says what /ready says, which it asks when a client asks or watches, and NOT_SERVING as
    soon as the block has ended.

    Raises:
        ConfigError: see ``InferenceServer.start``.
    """
    await server.start(is_ready=False, look=ReadyStatus(client, server.set_ready).look)
    try:
        yield
    finally:
        await server.stop(grace_s)


def _prompt(params: GenerateParams) -> Prompt:
    if params.token_ids is not None:
        return params.token_ids
    if not params.text:
        raise InvalidRequestError("text is empty; allowed: at least one character", field="text")
    return params.text


def _prompt_field(params: GenerateParams) -> str:
    if params.messages:
        return "messages"
    return "text" if params.token_ids is None else "tokens"


def _within_range(timeout_s: float) -> float:
    """Clips a deadline to the allowed range: one that is over ends the call, a distant one is none."""
    return min(max(timeout_s, 0.001), RANGES["timeout_s"].high)


def generation_options(params: GenerateParams) -> GenerationOptions:
    timeout_s = None if params.timeout_s is None else _within_range(params.timeout_s)
    return GenerationOptions(
        **{**given_options(params), "timeout_s": timeout_s},
        default_max_tokens=None if params.messages else DEFAULT_MAX_TOKENS,
        names={"prompt": _prompt_field(params)},
    )


def _event(request: GenerateRequest, delta: Delta, num_output_tokens: int) -> GenerateEvent:
    is_last = delta.finish_reason is not None
    return GenerateEvent(
        request_id=request.request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        finish_reason=delta.finish_reason,
        usage=_usage(request, delta, num_output_tokens) if is_last else None,
        speculation=delta.stats if is_last else None,
        prompt_logprobs=delta.prompt_logprobs,
    )


def _usage(request: GenerateRequest, delta: Delta, num_output_tokens: int) -> TokenUsage:
    return TokenUsage(len(request.prompt_token_ids), num_output_tokens, delta.num_cached_tokens)
