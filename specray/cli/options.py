"""Options that several commands share: one annotated type, one name and one help text for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from specray.bench.core.options import DEFAULT_URL as DEFAULT_URL
from specray.bench.core.options import IsChat as IsChat
from specray.bench.core.options import MaxTokens as MaxTokens
from specray.bench.core.options import NumPrompts as NumPrompts
from specray.bench.core.options import PromptPath as PromptPath
from specray.bench.core.options import PromptSource as PromptSource
from specray.bench.core.options import Seed as Seed
from specray.bench.core.options import Temperature as Temperature
from specray.bench.core.options import Temperatures as Temperatures
from specray.types import MAX_SPECULATIVE_TOKENS

NUM_PROFILE_PROMPTS = 48
"""Number of prompts on which ``profile``, and ``plan --check``, measure acceptance."""


class EngineRole(StrEnum):
    """The two engines of a pair."""

    DRAFT = "draft"
    TARGET = "target"


ConfigPath = Annotated[Path | None, typer.Option(help="Configuration file (YAML).")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Sets any key of the configuration: dotted.key=value. May be repeated."),
]

# The pair.
TargetModel = Annotated[
    str | None, typer.Option(help="Target model: path, GGUF file, hub id, known name, or embedded.")
]
ServedTarget = Annotated[
    str | None,
    typer.Option(help="Target model: path, GGUF file, hub id, known name, embedded, or auto (default)."),
]
DraftModel = Annotated[
    str | None, typer.Option(help="Draft model: path, GGUF file, hub id, known name, or embedded.")
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Draft model: path, GGUF file, hub id, known name, embedded; or ngram, suffix, lookahead, "
        "features, remote-features, none."
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(help="Directory of a drafter that reads the target's features, or 'mtp'."),
]
Model = Annotated[str, typer.Option(help="Model: path, hub id, or embedded.")]
Role = Annotated[EngineRole, typer.Option(help="Engine, and which model of the embedded pair.")]
WeightFormats = Annotated[
    list[str] | None,
    typer.Option(
        "--quantization",
        help="Weights: none (a file's own bits), dtype (dequantised), int8, int4; or LAYERS:LM_HEAD, such as "
        "int4:int8; @float32 or @bfloat16 after it is the dtype. May be repeated.",
    ),
]
Dtype = Annotated[str | None, typer.Option(help="Number format of the weights: bfloat16 or float32.")]
StoredBits = Annotated[
    str | None,
    typer.Option(
        help="Weights that a file stores quantised: auto (its own bits where there are kernels) or dtype."
    ),
]
Device = Annotated[str | None, typer.Option(help="Device: auto, cpu, or cuda.")]
NumThreads = Annotated[
    int | None, typer.Option(help="CPU threads per engine; default: by cores and model size.")
]
MaxModelLen = Annotated[int | None, typer.Option(help="Maximum tokens of a sequence.")]

# How the pair speculates.
NumSpeculativeTokens = Annotated[
    str | None,
    typer.Option(help=f"Maximum draft tokens per round (K): 0..{MAX_SPECULATIVE_TOKENS}, or auto."),
]
Verification = Annotated[
    str | None, typer.Option(help="How draft tokens are verified: coupled or rejection.")
]
OverlapMode = Annotated[
    str | None,
    typer.Option(help="What the draft does while the target verifies: serial, ahead, enumerate, auto."),
]
Tree = Annotated[
    str | None,
    typer.Option(
        help="Trees of draft tokens: off, auto, a number of nodes, or children by depth such as 4x2x1."
    ),
]

# What is measured, and where the results go.
NumSequences = Annotated[list[int] | None, typer.Option(min=1, help="Sequences per batch; may be repeated.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="File for the results (JSON).")]
ReportPath = Annotated[
    Path | None,
    typer.Option("--report", help="File for a page with the results, machine and commit (Markdown)."),
]


def option(default: Any, help: str, *names: str, **limits: Any) -> Any:
    """A field of a data class that is an option of each command with that class, see ``flattened``.

    Args:
        help: its text under ``--help``.
        names: in place of one that is made of the field's.
        limits: further arguments of ``typer.Option``.
    """
    return field(default=default, metadata={"option": typer.Option(*names, help=help, **limits)})


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of each parameter that is a data class in that parameter's place.

    A field is an ``option``, or has the annotation of one; so a command's options are declared once, and
    commands share those of one class.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    grouped: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    for parameter in inspect.signature(command).parameters.values():
        if (kind := grouped.get(parameter.name)) is None:
            parameters.append(
                parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY)
            )
            continue
        types = get_type_hints(kind, include_extras=True)
        for one in fields(kind):
            declared = one.metadata.get("option")
            annotation = types[one.name] if declared is None else Annotated[types[one.name], declared]
            own = inspect.Parameter(
                one.name, parameter.KEYWORD_ONLY, default=one.default, annotation=annotation
            )
            parameters.append(own)

    def run(**values: Any) -> None:
        for name, kind in grouped.items():
            values[name] = kind(**{one.name: values.pop(one.name) for one in fields(kind)})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
