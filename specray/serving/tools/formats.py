"""How model families write tool calls: one row per format, from which calls are read and are forced.

One table gives both, so that what is forced can always be read back. Text between calls is content, text
between reasoning markers is reasoning. Patterns are linear: nothing that a model writes makes them slow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import regex

from specray.serving.tools.json_calls import JsonCalls, JsonForm, either, named, objects
from specray.serving.tools.python_calls import PythonCalls
from specray.serving.tools.reader import NAME, SPACE, CallReader, Schemas
from specray.serving.tools.tag_calls import KEY, TagCalls, TagForm

MakeReader = Callable[[Schemas, Collection[str]], CallReader]
"""Makes the reader of calls from the schemas of the tools and the names of those that may be called."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls."""

    name: str
    signs: tuple[str, ...]
    """Texts that a chat template of this format contains, all of them: regular expressions."""
    starts: tuple[str, ...]
    """Texts with which calls begin, anywhere in an answer."""
    reader: MakeReader
    """What reads on from there."""
    begin: str
    """Text before the first forced call."""
    before_name: str
    after_name: str
    """Text between a forced call's name and its arguments."""
    after: str
    """Text after a forced call's arguments."""
    between: str
    """Text between two forced calls."""
    end: str
    """Text after the last forced call."""
    others: tuple[MakeReader, ...] = ()
    """What else may read on, where the reader finds no call."""
    bare: str = ""
    """Text with which calls begin at the start of an answer, too; empty: none."""
    markers: tuple[str, ...] = ()
    """Other texts of the format that may be tokens of their own."""
    allows_several: bool = True
    """Chat templates of this format take several calls in one turn."""
    can_be_forced: bool = True
    """A grammar of this format can be written."""
    before_key: str = ""
    """Text before a forced argument's name, where arguments are written one by one and not as JSON."""
    after_key: str = ""
    after_value: str = ""

    @property
    def writes_parameters(self) -> bool:
        """Arguments are written one by one between tags, and not as JSON."""
        return bool(self.before_key)


def _json(*forms: JsonForm) -> MakeReader:
    form = forms[0] if len(forms) == 1 else either(*forms)
    return lambda schemas, allowed: JsonCalls(form, allowed)


def _tags(form: TagForm) -> MakeReader:
    return lambda schemas, allowed: TagCalls(form, schemas, allowed)


_OBJECTS: Final = _json(objects("<tool_call>", "</tool_call>"))
_ARGUMENT_TAGS: Final = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_MISTRAL: Final = _json(
    named(
        opening=r"\[TOOL_CALLS\]",
        head=rf"{NAME}{SPACE}(?:\[CALL_ID\](?P<id>[\w-]{{1,64}}+){SPACE})?\[ARGS\]",
    ),
    objects(r"\[TOOL_CALLS\]", None),
)
_DEEPSEEK: Final = _json(
    named(
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>",
        head=rf"(?:function<｜tool▁sep｜>)?+{NAME}{SPACE}(?:<｜tool▁sep｜>{SPACE}(?:```json|(?!`))|```json)",
        after=rf"(?:```)?{SPACE}(?:<｜tool▁call▁end｜>)?",
        closing="<｜tool▁calls▁end｜>",
    )
)
_DEEPSEEK_MARKERS: Final = ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
FORMATS: Final = (
    ToolFormat(
        name="qwen3_coder",
        signs=("<tool_call>", "<function="),
        starts=("<tool_call>", "<function="),
        markers=("</tool_call>",),
        reader=_tags(
            TagForm(
                head=rf"(?:<tool_call>{SPACE})?<function=(?P<name>[^<>\n]{{1,256}}+)>",
                parameter=f"<parameter={KEY}>",
                value_end="</parameter>",
                has_lines=True,
                end="</function>",
                closing="</tool_call>",
            )
        ),
        others=(_OBJECTS,),
        begin="",
        before_name="<tool_call>\n<function=",
        after_name=">\n",
        after="</function>\n</tool_call>",
        between="\n",
        end="",
        before_key="<parameter=",
        after_key=">\n",
        after_value="\n</parameter>\n",
    ),
    ToolFormat(
        name="minimax_m2",
        signs=("<minimax:tool_call>", "<invoke name="),
        starts=("<minimax:tool_call>", "<invoke name="),
        markers=("</minimax:tool_call>",),
        reader=_tags(
            TagForm(
                head=rf"(?:<minimax:tool_call>{SPACE})?<invoke name=(?P<name>[^<>\n]{{1,256}}+)>",
                parameter=f"<parameter name={KEY}>",
                value_end="</parameter>",
                has_lines=False,
                end="</invoke>",
                closing="</minimax:tool_call>",
            )
        ),
        begin="<minimax:tool_call>\n",
        before_name='<invoke name="',
        after_name='">\n',
        after="</invoke>\n",
        between="",
        end="</minimax:tool_call>",
        before_key='<parameter name="',
        after_key='">',
        after_value="</parameter>\n",
    ),
    ToolFormat(
        name="hunyuan_v3",
        signs=("<tool_calls>", "<tool_sep>", "<arg_key>"),
        starts=("<tool_calls>", "<tool_call>"),
        markers=("</tool_calls>", "</tool_call>", "<tool_sep>", *_ARGUMENT_TAGS),
        reader=_tags(
            TagForm(
                head=rf"(?:<tool_calls>{SPACE})?<tool_call>{SPACE}{NAME}{SPACE}(?:<tool_sep>)?",
                parameter=rf"<arg_key>{KEY}</arg_key>{SPACE}<arg_value>",
                value_end="</arg_value>",
                has_lines=False,
                end="</tool_call>",
                closing="</tool_calls>",
            )
        ),
        begin="<tool_calls>\n",
        before_name="<tool_call>",
        after_name="<tool_sep>\n",
        after="</tool_call>\n",
        between="",
        end="</tool_calls>",
        before_key="<arg_key>",
        after_key="</arg_key>\n<arg_value>",
        after_value="</arg_value>\n",
    ),
    ToolFormat(
        name="glm45",
        signs=("<tool_call>", "<arg_key>"),
        starts=("<tool_call>",),
        markers=("</tool_call>", *_ARGUMENT_TAGS),
        reader=_tags(
            TagForm(
                head=rf"<tool_call>{SPACE}{NAME}(?={SPACE}(?:<arg_key>|</tool_call>))",
                parameter=rf"<arg_key>{KEY}</arg_key>{SPACE}<arg_value>",
                value_end="</arg_value>",
                has_lines=False,
                end="</tool_call>",
                closing="</tool_call>",
            )
        ),
        others=(_OBJECTS,),
        begin="",
        before_name="<tool_call>",
        after_name="\n",
        after="</tool_call>",
        between="\n",
        end="",
        before_key="<arg_key>",
        after_key="</arg_key>\n<arg_value>",
        after_value="</arg_value>\n",
    ),
    ToolFormat(
        name="hunyuan",
        signs=("<tool_calls>", "<tool_call>", "```json"),
        starts=("<tool_calls>", "<tool_call>"),
        markers=("</tool_calls>", "</tool_call>"),
        reader=_json(
            named(
                opening="<tool_calls>",
                begin="<tool_call>",
                head=rf"(?:function<tool_sep>{SPACE})?+{NAME}{SPACE}```json",
                after=rf"(?:```)?{SPACE}(?:</tool_call>)?",
                closing="</tool_calls>",
            ),
            objects("<tool_calls>", "</tool_calls>"),
        ),
        begin="<tool_calls>\n",
        before_name="<tool_call>",
        after_name="\n```json\n",
        after="\n```</tool_call>\n",
        between="",
        end="</tool_calls>",
    ),
    ToolFormat(
        name="hermes",
        # The call as JSON: written out, or as the filter writes it.
        signs=(r"<tool_call>", r"""["'](?:name|arguments)\\?["']\s*:|<tool_call>[^<|%]{0,64}\|\s*tojson"""),
        starts=("<tool_call>",),
        markers=("</tool_call>",),
        reader=_OBJECTS,
        begin="",
        before_name='<tool_call>\n{"name": "',
        after_name='", "arguments": ',
        after="}\n</tool_call>",
        between="\n",
        end="",
    ),
    ToolFormat(
        name="mistral_args",
        signs=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
        starts=("[TOOL_CALLS]",),
        markers=("[ARGS]", "[CALL_ID]"),
        reader=_MISTRAL,
        begin="",
        before_name="[TOOL_CALLS]",
        after_name="[ARGS]",
        after="",
        between="",
        end="",
    ),
    ToolFormat(
        name="mistral",
        signs=(r"\[TOOL_CALLS\]",),
        starts=("[TOOL_CALLS]",),
        reader=_MISTRAL,
        begin="[TOOL_CALLS] [",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after="}",
        between=", ",
        end="]",
    ),
    ToolFormat(
        name="deepseek_v3",
        signs=("<｜tool▁calls▁begin｜>", "```json"),
        starts=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        markers=_DEEPSEEK_MARKERS,
        reader=_DEEPSEEK,
        begin="<｜tool▁calls▁begin｜>",
        before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        after_name="\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        name="deepseek_v31",
        signs=("<｜tool▁calls▁begin｜>",),
        starts=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        markers=_DEEPSEEK_MARKERS,
        reader=_DEEPSEEK,
        begin="<｜tool▁calls▁begin｜>",
        before_name="<｜tool▁call▁begin｜>",
        after_name="<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        name="kimi_k2",
        signs=(r"<\|tool_call_argument_begin\|>",),
        starts=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        markers=("<|tool_calls_section_end|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        reader=_json(
            named(
                opening=r"<\|tool_calls_section_begin\|>",
                begin=r"<\|tool_call_begin\|>",
                head=rf"(?P<id>(?:functions\.)?+{NAME}(?::\d{{1,6}}+)?){SPACE}<\|tool_call_argument_begin\|>",
                after=r"(?:<\|tool_call_end\|>)?",
                closing=r"<\|tool_calls_section_end\|>",
            )
        ),
        begin="<|tool_calls_section_begin|>",
        before_name="<|tool_call_begin|>functions.",
        after_name=":0<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        between="",
        end="<|tool_calls_section_end|>",
        # A grammar cannot count calls.
        allows_several=False,
    ),
    ToolFormat(
        name="llama3_json",
        signs=(r"<\|python_tag\|>",),
        starts=("<|python_tag|>",),
        bare="{",
        reader=_json(objects(r"<\|python_tag\|>", None)),
        begin="",
        before_name='{"name": "',
        after_name='", "parameters": ',
        after="}",
        between="; ",
        end="",
        allows_several=False,
    ),
    ToolFormat(
        name="phi4_mini",
        signs=(r"<\|/tool\|>",),
        starts=("<|tool_call|>", "functools["),
        markers=("<|/tool_call|>",),
        reader=_json(objects(rf"(?:<\|tool_call\|>{SPACE}(?:functools)?+|functools)", r"<\|/tool_call\|>")),
        begin="<|tool_call|>[",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after="}",
        between=", ",
        end="]<|/tool_call|>",
    ),
    ToolFormat(
        name="granite",
        signs=(r"<\|tool_call\|>",),
        starts=("<|tool_call|>", "<tool_call>"),
        markers=("</tool_call>",),
        reader=_json(objects(r"(?:<\|tool_call\|>|<tool_call>)", "</tool_call>")),
        begin="<|tool_call|>[",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after="}",
        between=", ",
        end="]",
    ),
    ToolFormat(
        name="pythonic",
        signs=(r"\[func_name1\(params_name1=params_value1",),
        starts=(),
        bare="[",
        reader=lambda schemas, allowed: PythonCalls(allowed),
        begin="[",
        before_name="",
        after_name="(",
        after=")",
        between=", ",
        end="]",
        can_be_forced=False,
    ),
)
"""All formats; the first whose signs a template contains is the model's."""
MARKERS: Final = tuple(
    dict.fromkeys(
        ("<think>", "</think>", *(marker for row in FORMATS for marker in (*row.starts, *row.markers)))
    )
)
"""Texts that may be special tokens of a vocabulary and are needed to read an answer."""


def find_format(chat_template: str | None) -> ToolFormat | None:
    """The format of calls that a chat template writes; None: it is not known."""
    if chat_template is None:
        return None
    return next(
        (row for row in FORMATS if all(regex.search(sign, chat_template) for sign in row.signs)), None
    )
