"""The public gRPC service: runs its calls with the same checks and the same router as the HTTP ingress."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from specray.config import Config
from specray.config.live import LiveConfig
from specray.errors import InvalidRequestError
from specray.grammar import PreparedCompiler
from specray.interfaces import RouterClient
from specray.requests import GenerateRequest, ServiceInfo, TextOptions, sampling_options
from specray.rpc.inference.server import Admitter, GenerateEvent, GenerateParams, InferenceServer, Usage
from specray.rpc.status import status_of
from specray.serving.admission.api_keys import Caller, Keyring, stream_for
from specray.serving.admission.capacity import with_admission
from specray.serving.admission.fair_pool import Turn
from specray.serving.calls.bad_words import with_bad_word_ids
from specray.serving.calls.defaults import load_defaults
from specray.serving.calls.generate_requests import to_generate_requests, truncated
from specray.serving.calls.predictions import with_prediction_ids
from specray.serving.generation import Delta, close
from specray.serving.grammars import GrammarChecker
from specray.serving.grpc.chat import read_chat
from specray.serving.http.chat.plan import ChatPlanner
from specray.serving.http.openai_api import DEADLINE_MARGIN_S
from specray.serving.http.schemas import DEFAULT_MAX_TOKENS
from specray.serving.limits import ServiceLimits
from specray.serving.observe import CallObserver, CallRecord
from specray.serving.prompts import Prompt, encode_prompts
from specray.serving.readiness import watch_ready
from specray.serving.validation import (
    RANGES,
    GenerationOptions,
    check_model,
    check_options,
)
from specray.telemetry.conventions import operation_attributes, rpc_attributes
from specray.tokenization import Tokenizer

_LEAST_TIMEOUT_S = 0.001


class GrpcIngress:
    """rpc.inference.InferenceHandler in front of a RouterClient, for one caller; default: anybody."""

    def __init__(
        self,
        *,
        client: RouterClient,
        tokenizer: Tokenizer,
        config: Config | LiveConfig,
        caller: Caller | None = None,
        observer: CallObserver | None = None,
        compiler: PreparedCompiler | None = None,
    ) -> None:
        live = LiveConfig.of(config)
        config = live.now
        self._observer = observer or CallObserver(config.logging)
        self._caller = caller or Caller()
        self._client = with_admission(client, config)
        self._tokenizer = tokenizer
        self._grammars = GrammarChecker(compiler or PreparedCompiler.of(tokenizer))
        self._planner = ChatPlanner(tokenizer, live)
        self._defaults = load_defaults(config)
        self._limits = ServiceLimits(client, tokenizer, live)
        self._model_name = config.model_name
        self._timeout_s = config.router.request_timeout_s + DEADLINE_MARGIN_S

    def admitter(self, keyring: Keyring) -> Admitter:
        """Returns the function that picks a call's handler by its metadata: this one, for the caller."""

        def admit(authorization: Sequence[str]) -> GrpcIngress:
            handler = copy.copy(self)
            handler._caller = keyring.identify(authorization)
            return handler

        return admit

    async def generate(self, params: GenerateParams) -> AsyncGenerator[GenerateEvent, None]:
        """See rpc.inference.InferenceHandler."""
        record = self._observer.begin(
            "grpc",
            "Generate",
            client_request_id=params.client_request_id,
            traceparent=params.traceparent,
            attributes={
                **rpc_attributes("Generate"),
                **operation_attributes("chat" if params.messages else "text_completion"),
            },
        )
        events = self._generate(params, record)
        with self._observed(record):
            try:
                async for event in events:
                    yield event
            finally:
                await events.aclose()

    async def _generate(
        self, params: GenerateParams, record: CallRecord
    ) -> AsyncGenerator[GenerateEvent, None]:
        request = await self._request(params)
        tenant = self._caller.tenant_of(request)
        requests = record.describe(
            request.request_id, [request], tenant=tenant, model=self._model_name, is_stream=True
        )
        deltas = stream_for(self._caller, self._client, requests, self._tokenizer, timeout_s=self._timeout_s)
        try:
            async for delta in deltas:
                record.observe(delta)
                yield _event(request, delta, record.num_output_tokens)
        finally:
            await close(deltas)

    async def info(self) -> ServiceInfo:
        """See rpc.inference.InferenceHandler."""
        with self._observed(self._observer.begin("grpc", "Info")):
            return dataclasses.replace(await self._limits.info(), model=self._model_name)

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

    async def _request(self, params: GenerateParams) -> GenerateRequest:
        limits = await self._limits.get()
        check_model(params.model, limits)
        options = self._defaults.apply(_options(params))
        check_options(options, limits)
        turn = Turn(self._caller.standing("", 0)[0])
        if options.grammar is not None:
            await self._grammars.check(options.grammar, field="grammar", limits=limits, turn=turn)
        self._client.capacity.check(*self._caller.standing(options.tenant, options.priority or 0))
        chat = read_chat(params)
        if chat is None:
            prompts = await encode_prompts([_prompt(params)], self._tokenizer)
        else:
            plan = await self._planner.plan(
                chat, options, partial(self._grammars.read, field="tools", turn=turn)
            )
            prompts, options = [plan.prompt], plan.options
            if options.grammar is not None:
                field = options.grammar_field
                await self._grammars.check(options.grammar, field=field, limits=limits, turn=turn)
        options = with_bad_word_ids(options, self._tokenizer)
        options = await with_prediction_ids(options, self._tokenizer, limits)
        (request,) = to_generate_requests(
            truncated(prompts, options, limits), options, limits=limits, request_id=f"grpc-{uuid.uuid4().hex}"
        )
        return request


@asynccontextmanager
async def served(server: InferenceServer, client: RouterClient, *, grace_s: float) -> AsyncIterator[None]:
    """Serves while the block runs, and then finishes calls under way for at most ``grace_s`` seconds.

    The health service reports what /ready reports, and NOT_SERVING as soon as the block has ended.

    Raises:
        ConfigError: see ``InferenceServer.start``.
    """
    await server.start(is_ready=False)
    watch = asyncio.create_task(watch_ready(client, server.set_ready))
    try:
        yield
    finally:
        watch.cancel()
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
    return min(max(timeout_s, _LEAST_TIMEOUT_S), RANGES["timeout_s"].high)


def _options(params: GenerateParams) -> GenerationOptions:
    return GenerationOptions(
        max_tokens=params.max_tokens,
        default_max_tokens=None if params.messages else DEFAULT_MAX_TOKENS,
        **sampling_options(params),
        logit_bias=params.logit_bias,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        num_logprobs=params.logprobs,
        num_prompt_logprobs=params.prompt_logprobs,
        is_speculation_enabled=params.speculation_enabled,
        num_speculative_tokens=params.num_speculative_tokens,
        verification=params.verification,
        draft=params.draft,
        tenant=params.tenant,
        prediction=params.prediction,
        grammar=params.grammar,
        allowed_token_ids=params.allowed_token_ids or None,
        bad_words=params.bad_words,
        text=TextOptions(
            skip_special_tokens=params.skip_special_tokens is not False,
            include_stop=params.include_stop_str_in_output,
        ),
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        cache_salt=params.cache_salt,
        priority=params.priority,
        ttft_ms=params.ttft_ms,
        itl_ms=params.itl_ms,
        timeout_s=None if params.timeout_s is None else _within_range(params.timeout_s),
        names={
            "prompt": _prompt_field(params),
            "num_speculative_tokens": "speculation.num_speculative_tokens",
            "draft": "speculation.draft",
            "tenant": "speculation.tenant",
            "ttft_ms": "slo.ttft_ms",
            "itl_ms": "slo.itl_ms",
        },
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


def _usage(request: GenerateRequest, delta: Delta, num_output_tokens: int) -> Usage:
    return Usage(len(request.prompt_token_ids), num_output_tokens, delta.num_cached_tokens)
