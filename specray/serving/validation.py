"""Checks what a request may ask for, over HTTP and gRPC alike; ``request_options`` declares it.

Values arrive here with the right types; ``calls.generate_requests`` makes the routers' requests of them.
Nothing out of range reaches an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from types import MappingProxyType
from typing import Any, Final

from specray.errors import InvalidRequestError, shown
from specray.request_options import Option, Range, RequestOptions, declare, declared_options
from specray.requests import AdapterRef, ServiceLevel, TextOptions
from specray.types import DraftKind, Verification

_MOST_TOKENS: Final = (1 << 31) - 1
"""Largest ``max_tokens`` that is understood, where it is cut to what is left."""
MAX_PROMPTS: Final = 128
MAX_CHOICES: Final = 1024
"""Largest number of prompts times n in one call, whatever the routers hold."""


class ContextLengthError(InvalidRequestError):
    """A prompt, alone or with its output, is longer than the context. Clients know it by its code."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the served model."""

    model_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    verification: Verification = Verification.COUPLED
    """Verification of a request that asks for none."""
    has_draft_model: bool = True
    """True if a request may ask for a draft model."""
    max_choices: int = MAX_CHOICES
    """Largest number of prompts times n in one call; more than the routers hold would never be admitted."""
    cuts_max_tokens: bool = True
    """True if ``max_tokens`` is a bound, cut to the context that is left; False: more is refused."""
    level: ServiceLevel | None = None
    """Times for requests that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions(RequestOptions):
    """Options of one call, whatever API it came through, and what was made of them."""

    n: int | None = declare("Number of answers to each prompt.", Range(1, 128))
    default_max_tokens: int | None = None
    """Output tokens without ``max_tokens``, cut to the context that is left; None: all that is left."""
    prediction_ids: tuple[int, ...] = ()
    """Token ids of ``prediction``, from ``calls.option_texts``."""
    grammar_field: str = "grammar"
    """Name of the field that holds the grammar, for error messages."""
    adapter_ref: AdapterRef | None = None
    """What ``adapter``, or the model's name, stands for; None: the base."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of ``bad_words``, from ``calls.bad_words``."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that are text though others are skipped."""
    message_tails: tuple[int, ...] = ()
    """Last tokens of the prompt from some of its last messages' borders on, from ``calls.borders``."""
    reports_rounds: bool = False
    """The deltas of a stream report the rounds that brought them."""
    names: Mapping[str, str] = dataclass_field(default_factory=dict)
    """Names of fields in this API where they differ, for error messages."""

    @property
    def text(self) -> TextOptions:
        return TextOptions(
            skip_special_tokens=self.skip_special_tokens is not False,
            include_stop=self.include_stop_str_in_output,
            shown_token_ids=self.shown_token_ids,
        )

    def name(self, own_name: str) -> str:
        """Returns the field's name in the user's API."""
        declared = CALL_OPTIONS.get(own_name)
        return self.names.get(own_name, own_name if declared is None else declared.path)


CALL_OPTIONS: Final = declared_options(GenerationOptions)
RANGES: Final[Mapping[str, Range]] = MappingProxyType(
    {
        "top_logprobs": Range(0, 20),
        **{
            each.path: each.allowed
            for each in CALL_OPTIONS.values()
            if each.allowed is not None and (each.default is None or each.name == "logit_bias")
        },
    }
)
"""Allowed values of every numeric field that do not depend on others, by the field's name in HTTP bodies."""


def check_range(allowed: Range, field: str, value: float, *, what: str | None = None) -> None:
    """Raises InvalidRequestError for a value outside, naming the field (and ``what`` of it is meant)."""
    if not allowed.contains(value):
        raise out_of_range(field, value, str(allowed), what=what)


def out_of_range(field: str, value: object, allowed: str, *, what: str | None = None) -> InvalidRequestError:
    """Makes the error that names the field, its value (or that of ``what`` about it) and what is allowed."""
    return InvalidRequestError(f"{what or field} is {shown(value)}; allowed: {allowed}", field=field)


def check_options(options: GenerationOptions, limits: Limits) -> None:
    """Raises InvalidRequestError for the first option out of range, prompts aside."""
    for each in CALL_OPTIONS.values():
        _check_declared(each, getattr(options, each.name), options.name(each.name))
    _check_draft(options, limits)
    _check_grammar(options)
    _check_lengths(options, limits)
    check_token_ids("logit_bias", [token_id for token_id, _ in options.logit_bias], limits)
    for token_id, bias in options.logit_bias:
        check_range(RANGES["logit_bias"], "logit_bias", bias, what=f"logit_bias of token {token_id}")
    check_token_ids("stop_token_ids", options.stop_token_ids, limits)
    _check_allowed_ids(options, limits)
    _check_truncation(options, limits)


def _check_declared(declared: Option, value: Any, name: str) -> None:
    """Checks a value against its declaration alone."""
    if value is None:
        return
    if declared.num_entries is not None:
        check_range(declared.num_entries, name, len(value), what=f"number of {declared.entries} in {name}")
    if declared.allowed is None:
        return
    if isinstance(value, str):
        check_range(declared.allowed, name, len(value), what=f"length of {name}")
    elif not isinstance(value, tuple):
        check_range(declared.allowed, name, value)
    elif declared.name != "logit_bias":
        what = f"length of a {declared.entries.removesuffix('s')} in {name}"
        for entry in value:
            check_range(declared.allowed, name, len(entry), what=what)


def check_sizes(sizes: Sequence[int], options: GenerationOptions, limits: Limits, *, least: bool) -> None:
    """Raises InvalidRequestError for too many prompts, or the first that is too long for the context.

    Args:
        sizes: tokens of each prompt.
        least: the prompts are not tokenized yet, and have at least so many.
    """
    name = options.name("prompt")
    check_range(Range(1, MAX_PROMPTS), name, len(sizes), what=f"number of prompts in {name}")
    check_range(
        Range(1, limits.max_choices), "n", len(sizes) * (options.n or 1), what="number of prompts times n"
    )
    if least and options.truncate_prompt_tokens is not None:
        return
    for size in sizes:
        if size >= limits.max_model_len:
            number = "least number" if least else "number"
            what, allowed = f"{number} of tokens in {name}", f"1..{limits.max_model_len - 1}"
            raise _too_long(name, size, allowed, limits, what=what)


def check_prompts(prompts: Sequence[tuple[int, ...]], options: GenerationOptions, limits: Limits) -> None:
    """Raises InvalidRequestError for the first prompt that is empty, too long or outside the vocabulary."""
    name = options.name("prompt")
    check_sizes([len(token_ids) for token_ids in prompts], options, limits, least=False)
    for token_ids in prompts:
        if not token_ids:
            raise InvalidRequestError(f"{name} is empty; allowed: at least one token", field=name)
        check_token_ids(name, token_ids, limits)
        if options.max_tokens is not None and not limits.cuts_max_tokens:
            room = limits.max_model_len - len(token_ids)
            if options.max_tokens > room:
                allowed = f"1..{room} after a {name} of {len(token_ids)} tokens"
                raise _too_long(options.name("max_tokens"), options.max_tokens, allowed, limits)


def check_token_ids(name: str, token_ids: Sequence[int], limits: Limits) -> None:
    """Raises InvalidRequestError for the first id outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise out_of_range(name, token_id, f"0..{limits.vocab_size - 1}", what=f"token id in {name}")


def _too_long(
    field: str, value: int, allowed: str, limits: Limits, *, what: str | None = None
) -> ContextLengthError:
    problem = out_of_range(field, value, allowed, what=what)
    # OpenAI's words, for clients that look at the message and not at the code.
    maximum = f"this model's maximum context length is {limits.max_model_len} tokens"
    return ContextLengthError(f"{problem}; {maximum}", field=field)


def _check_grammar(options: GenerationOptions) -> None:
    """Refuses what would leave no token where a grammar ends, or within it, or free text behind it."""
    if options.grammar is None:
        return
    for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
        value = getattr(options, name)
        if value:
            raise InvalidRequestError(
                f"{options.name(name)} is set together with {options.grammar_field}; allowed: one of them",
                field=options.name(name),
            )


def _check_draft(options: GenerationOptions, limits: Limits) -> None:
    if options.draft is DraftKind.MODEL and not limits.has_draft_model:
        allowed = ", ".join(kind for kind in DraftKind if kind not in (DraftKind.MODEL, DraftKind.FEATURES))
        raise out_of_range(
            options.name("draft"), options.draft.value, f"{allowed} (no draft model is served)"
        )


def _check_lengths(options: GenerationOptions, limits: Limits) -> None:
    longest = limits.max_model_len - 1
    if options.max_tokens is not None:
        most = _MOST_TOKENS if limits.cuts_max_tokens else longest
        check_range(Range(1, most), options.name("max_tokens"), options.max_tokens)
        longest = options.max_tokens
    elif options.default_max_tokens is not None:
        longest = options.default_max_tokens
    if options.min_tokens is not None:
        check_range(Range(0, longest), "min_tokens", options.min_tokens)


def _check_allowed_ids(options: GenerationOptions, limits: Limits) -> None:
    allowed = options.allowed_token_ids
    if allowed is None:
        return
    check_token_ids("allowed_token_ids", allowed, limits)
    eos_token_ids = () if options.ignore_eos else limits.eos_token_ids
    if options.min_tokens and set(allowed) <= {*eos_token_ids, *options.stop_token_ids}:
        raise InvalidRequestError(
            "allowed_token_ids has stop tokens alone, together with min_tokens; allowed: another id, too",
            field="allowed_token_ids",
        )


def _check_truncation(options: GenerationOptions, limits: Limits) -> None:
    most = options.truncate_prompt_tokens
    allowed = Range(1, limits.max_model_len - 1)
    if most is not None and most != -1 and not allowed.contains(most):
        raise out_of_range("truncate_prompt_tokens", most, f"-1 or {allowed}")
