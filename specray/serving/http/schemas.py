"""Request bodies of the OpenAI APIs, with vLLM's additional fields: what they share, and completions.

pydantic checks types here, without coercion; ``validation`` checks ranges.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specray.errors import InvalidRequestError, shown
from specray.grammar.forms import FIELDS, MODIFIERS, asking_field, grammar_of
from specray.request_options import Option, Range
from specray.serving.calls.option_texts import parse_prediction
from specray.serving.calls.prompts import Prompt, parse_prompt
from specray.serving.http.extras import check_extras
from specray.serving.validation import CALL_OPTIONS, RANGES, GenerationOptions, out_of_range
from specray.types import DraftKind, Verification

DEFAULT_MAX_TOKENS = 16
"""Output tokens of the completions API where a body sets none; a chat may use the rest of the context."""

GRAMMAR_FIELDS = frozenset((*FIELDS, *MODIFIERS))
"""Names of fields that may ask for structured output."""


MAX_ENTRIES: Final = 1024
"""Entries of a map, and fields of an object. pydantic finds all that is wrong, and everybody waits for it."""


def _few(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError("too_long", "a few entries", {"max_length": MAX_ENTRIES})
    return value


FEW: Final = BeforeValidator(_few)
"""Marks a map whose entries have a type."""


class Fields(BaseModel):
    """An object of a body: types are checked without coercion, and other fields are kept."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_length(cls, values: object) -> object:
        return _few(values)


@dataclass(frozen=True, slots=True)
class Nested:
    """Marks a field that is checked elsewhere: the objects in it have the fields of a schema."""

    schema: type[Fields]


class TextPartFields(Fields):
    """A part of content that is text."""

    type: Any = None
    text: Any = None


class PredictionFields(Fields):
    """A predicted output; ``parse_prediction`` checks it."""

    type: Any = None
    content: Annotated[Any, Nested(TextPartFields)] = None


class StrictFields(Fields):
    """An object that has no other fields."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(StrictFields):
    """Options of a stream.

    ``include_usage`` puts token counts in a last event, ``continuous_usage_stats`` in each, and
    ``include_speculation`` adds an event for each round.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Token counts in every event, as in vLLM; ignored without ``include_usage``."""
    include_speculation: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted and ignored: nothing is padded here."""


_BODY_TYPES: Final[Mapping[Any, Any]] = {
    tuple[int, ...]: list[int],
    tuple[int, ...] | None: list[int],
    tuple[str, ...]: list[str],
    Verification | None: str,
    DraftKind | None: str,
}
"""Types of fields in a body whose options have another type."""
_OWN_TYPES: Final[Mapping[str, Any]] = {
    "stop": Any,
    "logit_bias": Annotated[dict[str, float] | None, FEW],
    "prediction": Annotated[Any, Nested(PredictionFields)],
}
_BODY_OPTIONS: Final = {
    name: declared for name, declared in CALL_OPTIONS.items() if name not in ("grammar", "logprobs")
}
"""Options that all bodies have under the same name."""
_HINTS: Final = get_type_hints(GenerationOptions)


def _body_field(declared: Option) -> tuple[Any, Any]:
    hint = _HINTS[declared.name]
    kind = _BODY_TYPES.get(hint, hint)
    fail_fast = True if kind in (list[int], list[str]) else None
    if declared.name in _OWN_TYPES:
        # Not within a union, where pydantic would not find what marks the field.
        kind, fail_fast = _OWN_TYPES[declared.name], None
    else:
        kind = kind | None
    return kind, Field(None, fail_fast=fail_fast, description=declared.doc)


def _object(name: str, parent: str) -> Any:
    """The schema of an object that holds options."""
    options = {each.path: each for each in _BODY_OPTIONS.values() if each.path.startswith(f"{parent}.")}
    fields = {path.rpartition(".")[2]: _body_field(each) for path, each in options.items()}
    return create_model(name, __base__=StrictFields, **fields)  # type: ignore[call-overload]


_OptionFields = create_model(  # type: ignore[call-overload]
    "_OptionFields",
    __base__=Fields,
    slo=(_object("ServiceLevelFields", "slo") | None, None),
    speculation=(_object("SpeculationFields", "speculation") | None, None),
    **{name: _body_field(each) for name, each in _BODY_OPTIONS.items() if each.path == name},
)
"""The declared options as fields of a body."""


class SamplingFields(_OptionFields):
    """Fields that both APIs have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_speculation_metrics: bool | None = None
    return_token_ids: bool | None = None
    """Ids of prompt and output in the answer, as in vLLM."""

    if TYPE_CHECKING:
        # Declared options that this package reads.
        n: int | None
        max_tokens: int | None
        prompt_logprobs: int | None
        truncate_prompt_tokens: int | None
        timeout_s: float | None

    # Default of ``max_tokens``; None: all of the context that is left.
    default_max_tokens: ClassVar[int | None] = None

    # Names of fields in this API where they differ from those in ``validation``.
    field_names: ClassVar[dict[str, str]] = {}

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens per position; None: no logprobs."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens per position of the prompt; None: the prompt has no logprobs."""
        return self.prompt_logprobs

    @property
    def grammar_field(self) -> str | None:
        """Name of a field that may ask for structured output; None: the body has none."""
        return asking_field(self.model_extra or {})

    def max_tokens_field(self) -> tuple[str, int | None]:
        """Returns the name of the field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with its token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        """True if every event of a stream carries the token counts so far."""
        options = self.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def includes_rounds(self) -> bool:
        """True if a stream tells its rounds."""
        return self.stream_options is not None and bool(self.stream_options.include_speculation)

    def options(self) -> GenerationOptions:
        """Returns the request without its prompt. Raises InvalidRequestError."""
        extras = self.model_extra or {}
        asked = {name: value for name, value in extras.items() if name in GRAMMAR_FIELDS}
        check_extras({name: extras[name] for name in extras.keys() - asked.keys()}, n=self.n or 1)
        grammar, grammar_field = grammar_of(asked) or (None, "grammar")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is set without stream; allowed: only with stream true", field="stream_options"
            )
        if self.num_prompt_logprobs is not None and self.stream:
            field = "prompt_logprobs" if self.prompt_logprobs is not None else "echo"
            raise InvalidRequestError(
                f"{field} asks for the prompt's logprobs, which no stream carries; allowed: stream false",
                field=field,
            )
        max_tokens_name, max_tokens = self.max_tokens_field()
        given = {name: _given(self, declared) for name, declared in _BODY_OPTIONS.items()}
        given |= {
            "max_tokens": max_tokens,
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.num_prompt_logprobs,
            "grammar": grammar,
        }
        return GenerationOptions(
            **{name: value for name, value in given.items() if value is not None},
            default_max_tokens=self.default_max_tokens,
            grammar_field=grammar_field,
            reports_rounds=self.includes_rounds,
            names={"max_tokens": max_tokens_name, **self.field_names},
        )


def _given(body: SamplingFields, declared: Option) -> Any:
    """What a body has of an option, as the option has it; None: nothing."""
    value: Any = body
    for name in declared.path.split("."):
        value = None if value is None else getattr(value, name)
    if value is None:
        return None
    match declared.name:
        case "stop":
            return _stop(value)
        case "logit_bias":
            return _logit_bias(value)
        case "verification":
            return _one_of(Verification, declared.path, value)
        case "draft":
            return _one_of(DraftKind, declared.path, value)
        case "prediction":
            return parse_prediction(value)
        case _:
            return tuple(value) if isinstance(value, list) else value


class CompletionRequest(SamplingFields):
    """The body of /v1/completions."""

    default_max_tokens: ClassVar[int | None] = DEFAULT_MAX_TOKENS

    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)

    @property
    def hides_output(self) -> bool:
        """True if the prompt alone is asked about: a token is generated all the same, and left out."""
        return self.max_tokens == 0

    def max_tokens_field(self) -> tuple[str, int | None]:
        return "max_tokens", 1 if self.hides_output else self.max_tokens

    def prompts(self) -> list[Prompt]:
        """Returns the prompts as text or token ids. Raises InvalidRequestError for anything else."""
        if self.prompt is None:
            raise InvalidRequestError("prompt is missing; allowed: text or token ids", field="prompt")
        return parse_prompt(self.prompt)


RequestT = TypeVar("RequestT", bound=BaseModel)
ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


def parse_request(schema: type[RequestT], values: object) -> RequestT:
    """Checks the types of a decoded JSON body.

    Raises:
        InvalidRequestError: names the first wrong field, its value and what is allowed.
    """
    if not isinstance(values, dict):
        raise InvalidRequestError(f"the body is {shown(values)}; allowed: a JSON object")
    if len(values) > MAX_ENTRIES:
        raise InvalidRequestError(f"the body has {len(values)} fields; allowed: at most {MAX_ENTRIES}")
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise _first_problem(error) from None


def _first_problem(error: ValidationError) -> InvalidRequestError:
    problem = error.errors(include_url=False)[0]
    path = _path(problem["loc"])
    if problem["type"] == "missing":
        return InvalidRequestError(f"{path} is missing", field=path)
    if problem["type"] == "extra_forbidden":
        return InvalidRequestError(f"{path} is not a field of this API", field=path)
    if problem["type"] == "too_long":
        most = Range(0, problem["ctx"]["max_length"])
        number = len(problem["input"])
        return out_of_range(path, number, str(most), what=f"number of entries in {path}")
    allowed = problem["msg"].removeprefix("Input should be ")
    # Another API may have the field as a boolean, and an entry of a map any name.
    is_number = problem["type"].startswith(("int_", "float_"))
    limits = RANGES.get(path) if is_number else None
    return InvalidRequestError(
        f"{path} is {shown(problem['input'])}; allowed: {allowed}" + (f" in {limits}" if limits else ""),
        field=path,
    )


def _path(parts: tuple[int | str, ...]) -> str:
    """Writes the path of a field as OpenAI does: ``messages[0].role``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")[:100]


def _stop(value: object) -> tuple[str, ...]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise out_of_range("stop", value, "a string or a list of strings")
    return tuple(entries)


def _logit_bias(entries: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for key in entries:
        # Digits only: int() also takes signs, spaces, underscores and digits of other scripts.
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise out_of_range("logit_bias", key, "token ids written in digits", what="a key of logit_bias")
    return tuple((int(key), bias) for key, bias in entries.items())


def _one_of(choices: type[ChoiceT], field: str, value: str) -> ChoiceT:
    try:
        return choices(value)
    except ValueError:
        raise out_of_range(field, value, " or ".join(sorted(choices))) from None
