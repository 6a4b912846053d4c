"""Types of the public InferenceService in domain terms, without gRPC or protobuf."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from specray.request_options import RequestOptions
from specray.requests import FinishReason, ServiceInfo, SpeculationStats
from specray.types import TokenLogprobs

ParamsT = TypeVar("ParamsT")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; empty means not given."""

    role: str
    content: str | None = None
    """Text; None: an assistant's message that has calls alone."""
    name: str = ""
    tool_calls: str = ""
    """Calls of tools: the JSON text of a list, as in OpenAI's API."""
    tool_call_id: str = ""
    """Id of the call that a tool's message answers."""
    reasoning_content: str = ""


@dataclass(frozen=True, slots=True)
class GenerateParams(RequestOptions):
    """Parameters of a Generate call; None and empty mean not given. The handler checks ranges.

    Exactly one of ``text``, ``token_ids`` and ``messages`` is given. ``timeout_s`` is what is left until the
    call's deadline, which the call itself carries.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] = ()
    tools: str = ""
    """Tools that the chat template shows: the JSON text of a list, as in OpenAI's API."""
    chat_template_kwargs: str = ""
    """Variables of the chat template: the JSON text of an object."""
    model: str = ""
    """Model name; empty: the only model that is served."""
    traceparent: str = ""
    """W3C trace context, sent as metadata ``traceparent``."""
    client_request_id: str = ""
    """Caller's name of the request in logs, sent as metadata ``x-request-id``."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of one request."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, not computed."""


@dataclass(frozen=True, slots=True)
class GenerateEvent:
    """One message of the answer. The last one has ``finish_reason``, ``usage`` and ``speculation``."""

    request_id: str
    text: str = ""
    """Text that these tokens complete."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Reason of the end, never ``error``: a failed request raises an exception."""
    usage: TokenUsage | None = None
    speculation: SpeculationStats | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of the prompt's tokens but the first, on the last message, where they were asked for."""


class InferenceHandler(Protocol):
    """The public service in domain terms, without gRPC."""

    def generate(self, params: GenerateParams) -> AsyncIterator[GenerateEvent]:
        """Streams the answer. The iterator is closed when the client cancels or its deadline passes.

        Raises:
            InvalidRequestError, ModelNotFoundError: the caller's mistake; the message goes to the caller.
            OverloadedError: try again later.
            DeadlineExceededError: the time is over.
            EngineLostError: the request may be retried.
        """
        ...

    async def info(self) -> ServiceInfo: ...


Refused = Callable[[str, Exception], None]
"""Callback for calls that did not reach a handler: method and error."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A call of which only the metadata has come."""

    method: str
    authorization: Sequence[str]
    """Values of the metadata of this name."""
    timeout_s: float | None
    """Seconds left until the call's deadline; None: it has none."""


class AdmittedCall(Protocol):
    """A call that was let in."""

    @property
    def handler(self) -> InferenceHandler: ...

    async def receive(self, message: Awaitable[bytes], decode: Callable[[bytes], ParamsT]) -> ParamsT:
        """Waits for the call's message, for a bounded time, and decodes it.

        Raises:
            InvalidRequestError: it is malformed.
            DeadlineExceededError, OverloadedError: it comes too slowly, or there is no place for the call.
        """
        ...


Admitter = Callable[[Incoming], AbstractContextManager[AdmittedCall]]
"""Callback that lets a call in, by its metadata alone, for as long as the context lasts; raises
UnauthenticatedError, OverloadedError."""
