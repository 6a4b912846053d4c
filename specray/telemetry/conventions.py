"""Attributes of OpenTelemetry's semantic conventions, for the spans of calls: HTTP, gRPC and generative AI.

They hold numbers and names: no prompts, texts, stop strings, query strings or keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from specray.requests import GenerateRequest

Value = str | int | float | Sequence[str]
Attributes = Mapping[str, Value]

PROVIDER: Final = "specray"
"""Name of the provider of generative AI; the conventions list none for a service of one's own."""
MAX_CHARS: Final = 256
"""Maximum characters of a value that the caller wrote."""
_RPC_SERVICE: Final = "specray.v1.InferenceService"
_INT64_LIMIT: Final = 1 << 63
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class HttpCall:
    """What a request's first lines say of it."""

    method: str
    """Method; one that HTTP does not have is named apart."""
    known_method: str | None
    """None: the method is none of HTTP's."""
    route: str | None
    """Path template; None: the path has none."""
    path: str
    scheme: str
    host: str
    """Value of the header ``Host``; empty: there was none."""
    user_agent: str
    version: str
    """Version of HTTP, such as 1.1."""

    def attributes(self) -> Attributes:
        """Attributes of a server's span as it begins."""
        address, port = _split_host(self.host, self.scheme)
        values: dict[str, Value | None] = {
            "http.request.method": self.known_method or "_OTHER",
            "http.request.method_original": None if self.known_method else self.method[:MAX_CHARS],
            "http.route": self.route,
            "url.path": self.path[:MAX_CHARS],
            "url.scheme": self.scheme,
            "server.address": address[:MAX_CHARS],
            "server.port": port,
            "user_agent.original": self.user_agent[:MAX_CHARS],
            "network.protocol.version": self.version,
        }
        return {name: value for name, value in values.items() if value is not None and value != ""}


def rpc_attributes(method: str) -> Attributes:
    return {"rpc.system.name": "grpc", "rpc.method": f"{_RPC_SERVICE}/{method}"}


def operation_attributes(operation: str) -> Attributes:
    """What is known of a call to ``chat`` or ``text_completion`` before its body is read."""
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        # The name of the same until 2025, which many a collector reads still.
        "gen_ai.system": PROVIDER,
    }


def request_attributes(
    model: str, requests: Sequence[GenerateRequest], *, num_choices: int, is_stream: bool
) -> Attributes:
    """What a checked call asks for, with the service's defaults and its drawn seed.

    An option that leaves the distribution as it is has no attribute.

    Args:
        requests: one or more, of which the first counts: they differ in prompt and seed.
        num_choices: choices per prompt.
    """
    sampling = requests[0].sampling
    values: dict[str, Value] = {
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": requests[0].max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        # An attribute is a signed number of 64 bits.
        "gen_ai.request.seed": sampling.seed - (2 * _INT64_LIMIT if sampling.seed >= _INT64_LIMIT else 0),
        "gen_ai.request.stream": is_stream,
    }
    if sampling.top_p != 1.0:
        values["gen_ai.request.top_p"] = sampling.top_p
    if sampling.top_k:
        values["gen_ai.request.top_k"] = sampling.top_k
    if sampling.frequency_penalty:
        values["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if sampling.presence_penalty:
        values["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    if num_choices != 1:
        values["gen_ai.request.choice.count"] = num_choices
    return values


def response_attributes(
    model: str,
    response_id: str,
    finish_reasons: Sequence[str],
    *,
    num_input_tokens: int,
    num_cached_tokens: int,
    num_output_tokens: int,
    first_chunk_s: float | None,
) -> Attributes:
    """What a generating call has answered.

    Args:
        num_input_tokens: of every prompt once, as in the answer's usage.
        first_chunk_s: seconds from the call's arrival to the first tokens of a stream; None: no stream.
    """
    values: dict[str, Value] = {
        "gen_ai.response.model": model,
        "gen_ai.response.id": response_id,
        "gen_ai.response.finish_reasons": tuple(finish_reasons),
        "gen_ai.usage.input_tokens": num_input_tokens,
        "gen_ai.usage.cache_read.input_tokens": num_cached_tokens,
        "gen_ai.usage.output_tokens": num_output_tokens,
    }
    if first_chunk_s is not None:
        values["gen_ai.response.time_to_first_chunk"] = first_chunk_s
    return values


def status_attributes(protocol: str, code: str, error: str | None) -> Attributes:
    """How a call ended: HTTP status or gRPC code, and the server's own error code if any."""
    values: dict[str, Value] = {} if error is None else {"error.type": error}
    if protocol == "http":
        values["http.response.status_code"] = int(code)
    else:
        values["rpc.response.status_code"] = code
    return values


def _split_host(host: str, scheme: str) -> tuple[str, int | None]:
    """Address and port of a ``Host`` header; the address of IPv6 without its brackets."""
    address, colon, port = host.rpartition(":")
    if not colon or not port.isdecimal() or not port.isascii() or int(port[:6]) > 65535:
        address, port = host, ""
    return address.removeprefix("[").removesuffix("]"), int(port[:6]) if port else _DEFAULT_PORTS.get(scheme)
