"""The vocabulary of the public InferenceService in domain terms: no gRPC, no protobuf."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specray.requests import FinishReason, ServiceInfo, SpeculationStats
from specray.types import DraftKind, TokenLogprobs, Verification


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """What a caller of Generate asks; None and empty mean: not given. Ranges are the handler's to check.

    Exactly one of ``text`` and ``token_ids`` is given.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    model: str = ""
    """Empty: the only model that is served."""
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculation_enabled: bool | None = None
    num_speculative_tokens: int | None = None
    verification: Verification | None = None
    draft: DraftKind | None = None
    tenant: str = ""
    priority: int | None = None
    """Lower is served earlier."""
    timeout_s: float | None = None
    """What is left of the call's deadline; not part of the message."""
    traceparent: str = ""
    """W3C trace context; travels as metadata of this name."""
    client_request_id: str = ""
    """What the caller names the request in logs; travels as metadata ``x-request-id``."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Of the prompt: not computed but found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class GenerateEvent:
    """One message of the answer. The last one carries ``finish_reason``, ``usage`` and ``speculation``."""

    request_id: str
    text: str = ""
    """The text that these tokens complete."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Never ``error``: a failed request is an exception."""
    usage: Usage | None = None
    speculation: SpeculationStats | None = None


class InferenceHandler(Protocol):
    """What the public service does, without gRPC."""

    def generate(self, params: GenerateParams) -> AsyncIterator[GenerateEvent]:
        """The answer in pieces. The iterator is closed when the client cancels or its deadline passes.

        Raises:
            InvalidRequestError, ModelNotFoundError: the caller's mistake; the text goes to the caller.
            OverloadedError: try again later.
            DeadlineExceededError: the time is over.
            EngineLostError: the request may be retried.
        """
        ...

    async def info(self) -> ServiceInfo: ...


Refused = Callable[[str, Exception], None]
"""Told of calls that did not get to a handler: the method, and why."""
Admitter = Callable[[Sequence[str]], InferenceHandler]
"""Who handles a call that came with these ``authorization`` metadata; raises UnauthenticatedError."""
