"""The tools of one request: what is offered, and whether a call may, must or must not come."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from specray.errors import InvalidRequestError
from specray.serving.validation import out_of_range
from specray.types import Grammar

MAX_TOOLS: Final = 512
"""Tools of one request."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")


class ToolMode(StrEnum):
    """What a request says of calls."""

    NONE = "none"
    """No call is read out of the answer."""
    AUTO = "auto"
    """The model decides."""
    REQUIRED = "required"
    """The answer is one call or several."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    is_strict: bool
    """The arguments must validate, also where the model decides whether to call."""
    definition: Mapping[str, Any]
    """The tool as the request has it, for the chat template."""
    field: str = "tools"
    """Names the parameters in the request, for error messages."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and how they may be used."""

    tools: tuple[Tool, ...]
    """Every tool, for the chat template."""
    mode: ToolMode
    allowed: frozenset[str]
    """Names that a call may have."""
    is_parallel: bool
    """Several calls may come in one answer."""
    is_named: bool
    """One function was named: as at OpenAI it is called exactly once, and such an answer ends with ``stop``
    rather than ``tool_calls``."""

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name in self.allowed)

    def has_forced(self, text: Grammar | None) -> bool:
        """Whether calls are held to a grammar, where the text is to be of another one; None: it is free."""
        is_strict = any(tool.is_strict for tool in self.callable_tools)
        is_forced = self.mode is ToolMode.REQUIRED or is_strict or text is not None
        return self.mode is not ToolMode.NONE and is_forced

    @property
    def definitions(self) -> list[dict[str, Any]]:
        return [dict(tool.definition) for tool in self.tools]


def is_no_function(tool: object) -> bool:
    """True for a tool of another kind, such as OpenAI's own, of which the service has none."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind != "function"


def parse_tools(tools: object, choice: object, is_parallel: bool | None) -> ToolUse | None:
    """The request fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Returns:
        None without functions; tools of other kinds are left out.

    Raises:
        InvalidRequestError: a tool or the choice is malformed, or names a tool that is not there.
    """
    offered = _tools(tools)
    if not offered:
        _check_no_choice(choice)
        return None
    mode, allowed = _choice(choice, {tool.name for tool in offered})
    is_named = isinstance(choice, dict) and choice.get("type") == "function"
    return ToolUse(
        tools=offered,
        mode=mode,
        allowed=frozenset(allowed),
        is_parallel=is_parallel is not False and not is_named,
        is_named=is_named,
    )


def _tools(value: object) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise out_of_range("tools", value, f"a list of at most {MAX_TOOLS} tools")
    tools = dict[str, Tool]()
    for index, entry in enumerate(value):
        if is_no_function(entry):
            continue
        tool = _tool(f"tools[{index}]", entry)
        if tool.name in tools:
            raise out_of_range(f"tools[{index}].function.name", tool.name, "a name that no other tool has")
        tools[tool.name] = tool
    return tuple(tools.values())


def _tool(where: str, value: object) -> Tool:
    if not isinstance(value, dict):
        raise out_of_range(where, value, "an object of type function")
    if value.get("type") != "function":
        raise out_of_range(f"{where}.type", value.get("type"), "function")
    function = value.get("function")
    if not isinstance(function, dict):
        raise out_of_range(f"{where}.function", function, "an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise out_of_range(f"{where}.function.name", name, "1..256 letters, digits, _, . and -")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise out_of_range(f"{where}.function.parameters", parameters, "a JSON schema of an object")
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict):
        raise out_of_range(f"{where}.function.parameters.properties", properties, "an object")
    if not isinstance(required, list) or not all(isinstance(entry, str) for entry in required):
        raise out_of_range(f"{where}.function.parameters.required", required, "a list of names")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise out_of_range(f"{where}.function.strict", strict, "true or false")
    return Tool(name, {"type": "object", **parameters}, bool(strict), value, f"{where}.function.parameters")


def _check_no_choice(choice: object) -> None:
    if choice not in (None, "none", "auto"):
        raise InvalidRequestError(
            "tool_choice is set without tools; allowed: none, auto or absent", field="tool_choice"
        )


def _choice(value: object, names: set[str]) -> tuple[ToolMode, set[str]]:
    if value is None:
        return ToolMode.AUTO, names
    if isinstance(value, str) and value in tuple(ToolMode):
        return ToolMode(value), names
    if isinstance(value, dict) and value.get("type") == "function":
        return ToolMode.REQUIRED, {_named("tool_choice", value, names)}
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed(value.get("allowed_tools"), names)
    raise out_of_range("tool_choice", value, "none, auto, required, a function, or allowed_tools")


def _allowed(value: object, names: set[str]) -> tuple[ToolMode, set[str]]:
    where = "tool_choice.allowed_tools"
    if not isinstance(value, dict) or value.get("mode") not in ("auto", "required"):
        raise out_of_range(where, value, "an object with mode auto or required, and tools")
    tools = value.get("tools")
    if not isinstance(tools, list) or not tools:
        raise out_of_range(f"{where}.tools", tools, "a list of at least one function")
    chosen = {_named(f"{where}.tools[{index}]", entry, names) for index, entry in enumerate(tools)}
    return ToolMode(value["mode"]), chosen


def _named(where: str, value: object, names: set[str]) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        raise out_of_range(f"{where}.function.name", name, f"one of {', '.join(sorted(names))}")
    return name
