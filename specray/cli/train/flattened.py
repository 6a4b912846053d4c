"""Lets several commands share options: fields of a data class become options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its parameter ``options``, a data class, in that parameter's place.

    Each field has an annotation as an option of typer has it, and a default.
    """
    hints = get_type_hints(command, include_extras=True)
    kind = hints["options"]
    own = get_type_hints(kind, include_extras=True)
    names = [field.name for field in fields(kind)]

    def run(**values: Any) -> None:
        shared = {name: values.pop(name) for name in names}
        command(**values, options=kind(**shared))

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name != "options":
            parameters.append(
                parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            )
            continue
        for field in fields(kind):
            assert field.default is not MISSING, "an option of several commands may be left out"
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=own[field.name],
                )
            )
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
