"""The options of a request, each declared once: type, default, allowed values, name on the wire and meaning.

HTTP bodies and their OpenAPI document (``serving.http.schemas``), the gRPC codec (``rpc.codec.inference``)
and the checks (``serving.validation``) take every option from here. docs/architecture.md says what else a new
one needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final

from specray.types import MAX_SPECULATIVE_TOKENS, DraftKind, Grammar, Verification


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed values of a numeric field, both ends included unless ``is_low_open``."""

    low: float
    high: float
    is_low_open: bool = False

    def __str__(self) -> str:
        if self.is_low_open:
            return f"more than {self.low} and at most {self.high}"
        return f"{self.low}..{self.high}"

    def contains(self, value: float) -> bool:
        """False for NaN too."""
        return (self.low < value if self.is_low_open else self.low <= value) and value <= self.high


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one option."""

    name: str
    default: Any
    doc: str
    path: str
    """Name in HTTP bodies and in the wire's message; with a dot, a field of an object in it."""
    allowed: Range | None
    """Values of a number, lengths of a text, or those of each entry of a list."""
    num_entries: Range | None
    entries: str
    """What the entries of a list are called."""
    on_wire: bool
    """False: gRPC has it otherwise, such as a call's deadline."""


def declare(
    doc: str,
    allowed: Range | None = None,
    *,
    default: Any = None,
    path: str = "",
    num_entries: Range | None = None,
    entries: str = "entries",
    on_wire: bool = True,
) -> Any:
    """A field of a dataclass that declares an option; ``path`` is the field's name where it is left out."""
    declared = Option("", default, doc, path, allowed, num_entries, entries, on_wire)
    return field(default=default, metadata={"option": declared})


def declared_options(owner: type) -> Mapping[str, Option]:
    found = {each.name: each.metadata["option"] for each in fields(owner) if "option" in each.metadata}
    return MappingProxyType(
        {name: replace(each, name=name, path=each.path or name) for name, each in found.items()}
    )


_DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a caller may ask for besides the prompt; None, or empty, is the service's default."""

    max_tokens: int | None = declare("Most output tokens; the context bounds it, too.")
    min_tokens: int | None = declare("Output tokens before which stop tokens are impossible.")
    temperature: float | None = declare("Divisor of the logits; 0 means greedy.", Range(0, 2))
    top_k: int | None = declare(
        "Number of likeliest tokens that remain; 0 and -1 are all.", Range(-1, 2**31 - 1)
    )
    top_p: float | None = declare(
        "Probability that the smallest set of remaining tokens reaches.", Range(0, 1, is_low_open=True)
    )
    min_p: float | None = declare(
        "Least probability of a remaining token, relative to the likeliest.", Range(0, 1)
    )
    repetition_penalty: float | None = declare(
        "Divisor of positive logits (factor of negative ones) of tokens in the prompt or the output.",
        Range(1 / 64, 64),
    )
    presence_penalty: float | None = declare("Subtracted from logits of tokens in the output.", Range(-2, 2))
    frequency_penalty: float | None = declare("The same, times the token's count.", Range(-2, 2))
    seed: int | None = declare("Key of all noise, of which 64 bits count.", Range(-(1 << 63), (1 << 64) - 1))
    logit_bias: tuple[tuple[int, float], ...] = declare(
        "Biases that are added to the logits of tokens.",
        Range(-100, 100),
        default=(),
        num_entries=Range(0, 1024),
    )
    stop: tuple[str, ...] = declare(
        "Strings that end the output.",
        Range(1, 256),
        default=(),
        num_entries=Range(0, 64),
        entries="strings",
    )
    stop_token_ids: tuple[int, ...] = declare(
        "Token ids that end the output.", default=(), num_entries=Range(0, 128), entries="ids"
    )
    ignore_eos: bool = declare("The end-of-sequence token does not end the output.", default=False)
    logprobs: int | None = declare("Likeliest tokens with logprobs besides each output token.", Range(0, 20))
    prompt_logprobs: int | None = declare(
        "Likeliest tokens with logprobs besides each prompt token.", Range(0, 20)
    )
    speculation_enabled: bool | None = declare("False: the target alone decodes.", path="speculation.enabled")
    num_speculative_tokens: int | None = declare(
        "Most draft tokens of a round.",
        Range(0, MAX_SPECULATIVE_TOKENS),
        path="speculation.num_speculative_tokens",
    )
    verification: Verification | None = declare(
        "Rule by which draft tokens are accepted.", path="speculation.verification"
    )
    draft: DraftKind | None = declare("What proposes draft tokens.", path="speculation.draft")
    tenant: str = declare(
        "Tenant whose past outputs a suffix draft may use, where the service stores them.",
        Range(0, 64),
        default="",
        path="speculation.tenant",
    )
    prediction: str = declare("Text that the output is expected to be close to.", default="")
    grammar: Grammar | None = declare("Language of the output.")
    allowed_token_ids: tuple[int, ...] | None = declare(
        "The only tokens that the output may have.", num_entries=Range(1, 4096), entries="ids"
    )
    bad_words: tuple[str, ...] = declare(
        "Words that the output must not contain.",
        Range(1, 256),
        default=(),
        num_entries=Range(0, 128),
        entries="words",
    )
    skip_special_tokens: bool | None = declare("False: special tokens are text, too.")
    include_stop_str_in_output: bool = declare("The text ends with what ended the output.", default=False)
    truncate_prompt_tokens: int | None = declare(
        "Tokens of a prompt's end that remain; -1: as many as leave room for max_tokens."
    )
    cache_salt: str = declare(
        "Only requests with an equal one share computed prefixes.", Range(0, 256), default=""
    )
    adapter: str = declare(
        "Name of the adapter that changes the model's weights; empty: the one that model names, if any.",
        Range(0, 64),
        default="",
    )
    prompt_cache_key: str = declare(
        "Requests with an equal one go to the same router where several would answer equally soon.",
        Range(0, 256),
        default="",
    )
    priority: int | None = declare("Lower is served earlier.", Range(-(1 << 63), (1 << 63) - 1))
    ttft_ms: float | None = declare(
        "Milliseconds to the first token that the caller wants.",
        Range(0, _DAY_MS, is_low_open=True),
        path="slo.ttft_ms",
    )
    itl_ms: float | None = declare(
        "Milliseconds per later output token that the caller wants.",
        Range(0, _DAY_MS, is_low_open=True),
        path="slo.itl_ms",
    )
    timeout_s: float | None = declare(
        "Seconds that the whole answer may take, cut to what the service allows.",
        Range(0, 86_400, is_low_open=True),
        on_wire=False,
    )


OPTIONS: Final = declared_options(RequestOptions)
"""The options that every API has, by name."""


def given_options(source: RequestOptions) -> dict[str, Any]:
    return {name: getattr(source, name) for name in OPTIONS}
