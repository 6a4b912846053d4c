"""Finds out what a chat template takes and writes, by small conversations that it renders once."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from specray.tokenization.templates.time_limit import MAX_RENDER_S, run_limited
from specray.tokenization.templates.turns import AssistantTurns

_ANSWER: Final = "probe-answer"
_THOUGHT: Final = "probe-thought"
_CALLED: Final = "probe_function"
_USER: Final = {"role": "user", "content": "probe-question"}
_ASSISTANT: Final = {"role": "assistant", "content": _ANSWER}
_SYSTEM: Final = ("probe-rule-1", "probe-rule-2", "probe-rule-3")
_TOOL_DEFAULTS: Final[tuple[Mapping[str, Any], ...]] = (
    MappingProxyType({}),
    MappingProxyType({"description": ""}),
    MappingProxyType({"parameters": {"type": "object", "properties": {}}}),
    MappingProxyType({"description": "", "parameters": {"type": "object", "properties": {}}}),
)
"""What a function may need that has a name alone, the least first."""


class TemplateProbe:
    """What one template takes and writes, each found at first need.

    Args:
        source: Jinja source.
        special_tokens: ``bos_token``, ``eos_token`` ..., as templates name them.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens

    @functools.cached_property
    def reads_tools(self) -> bool:
        """False: the template does not look at ``tools``, so that the model would not know them."""
        from jinja2 import TemplateError, meta

        try:
            return "tools" in meta.find_undeclared_variables(_environment().parse(self._source))
        except (TemplateError, RecursionError):  # It is refused when a chat comes.
            return False

    @functools.cached_property
    def keeps_system_messages(self) -> bool:
        """False: the template refuses or drops system messages after the first."""
        first, second, third = ({"role": "system", "content": text} for text in _SYSTEM)
        text = self._render([first, second, _USER, _ASSISTANT, third, _USER])
        return text is not None and all(rule in text for rule in _SYSTEM)

    @functools.cached_property
    def tool_defaults(self) -> Mapping[str, Any]:
        """Fields that the template reads of every function; empty where a name is enough."""
        for defaults in _TOOL_DEFAULTS:
            tool = {"type": "function", "function": {"name": "probe", **defaults}}
            if self._render([_USER], tools=[tool]) is not None:
                return defaults
        return _TOOL_DEFAULTS[0]

    @functools.cached_property
    def takes_all_defaults(self) -> bool:
        """False: the template joins the default of a parameter with choices to a text."""
        schema = {"type": "integer", "enum": [1], "default": 1}
        function: dict[str, Any] = {
            "name": "probe",
            "description": "",
            "parameters": {"type": "object", "properties": {"probe": schema}},
        }
        return self._render([_USER], tools=[{"type": "function", "function": function}]) is not None

    @functools.cached_property
    def turns(self) -> AssistantTurns:
        return AssistantTurns(self._render)

    def turn_end(self, names: Collection[str]) -> str | None:
        """The one of ``names`` that the template writes only after the assistant's last message."""
        rest = (self._render([_USER, _ASSISTANT]) or "").rpartition(_ANSWER)[2].lstrip()
        while found := [name for name in names if rest.startswith(name)]:
            name = max(found, key=len)
            if name not in self._inside_turns:
                return name
            rest = rest.removeprefix(name).lstrip()
        return None

    @functools.cached_property
    def _inside_turns(self) -> str:
        reasoned = self._render([_USER, {**_ASSISTANT, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}])
        inside = _between(reasoned, _THOUGHT, _ANSWER)
        forms: tuple[object, ...] = ({}, "{}")
        for arguments in forms:
            function = {"name": _CALLED, "arguments": arguments}
            calls = [{"id": "probe0001", "type": "function", "function": function}]
            called = self._render([_USER, {**_ASSISTANT, "tool_calls": calls}])
            inside += _between(called, _ANSWER, _CALLED)
        return inside

    @functools.cached_property
    def _template(self) -> Any:
        return _environment().from_string(self._source)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str | None:
        """The text of a conversation; None: the template refuses it."""
        try:
            template = self._template
            values = {"messages": messages, "tools": tools, "add_generation_prompt": False}
            text: str = run_limited(lambda: template.render(**self._special_tokens, **values), MAX_RENDER_S)
        except Exception:  # Templates raise all kinds, and a damaged one is refused when a chat comes.
            return None
        return text


def _between(text: str | None, first: str, second: str) -> str:
    """What is between two words of a text; empty where it does not have both."""
    inside, found, _ = (text or "").partition(first)[2].partition(second)
    return inside if found else ""


@functools.cache
def _environment() -> Any:
    """Renders as transformers does, which takes a second to import."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Reads ``{% generation %}``, with which templates name the assistant's part."""

        tags = {"generation"}  # noqa: RUF012  # Jinja's own form.

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
