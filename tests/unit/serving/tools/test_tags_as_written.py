"""Calls between tags as models really write them: strings that hold tags, and values by their schema."""

from __future__ import annotations

import pytest

from tests.unit.serving.tools.test_calls_as_written import Calls, check, written


@pytest.mark.parametrize(
    "value",
    [
        "use </parameter> tag",
        "a </tool_call> b",
        "a\n</parameter>\nb",
        "a\n</tool_call>\nb",
        "</function>\n</tool_call>",
        "<parameter=count>\n5",
        "a </parameter>\n</function>\n</tool_call> b",
        "a</parameter> <parameter=nothing>",
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "",
        "\n",
        "null",
        "5",
        '"a"',
        "</parameter",
        "<think> \\ </think>",
    ],
)
def test_a_string_between_tags_may_hold_tags(value: str) -> None:
    check("qwen3_coder", written("s", value), "ok", [("f", {"s": value})])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optional", "null", None),
        ("optional", "None", None),
        ("optional", "nullable", "nullable"),
        ("optional", "5", "5"),
        ("listed", "null", None),
        ("listed", "a", "a"),
        ("either", "5", 5),
        ("either", "5a", "5a"),
        ("either", '"a"', '"a"'),
        ("mode", "write", "write"),
        ("mode", '"write"', "write"),
        ("mode", "'write'", "write"),
        ("mode", '"other"', '"other"'),
        ("nullable_mode", "null", None),
        ("nullable_mode", '"read"', "read"),
        ("same", '"read"', "read"),
        ("point", '{"x": 1}', {"x": 1}),
        ("point", "{'x': None, 'y': True,}", {"x": None, "y": True}),
        ("point", '"{\\"x\\": 1}"', {"x": 1}),
        ("loop", "5", 5),
        ("const", "5", "5"),
        ("levels", "1", 1),
        ("levels", "max", "max"),
        ("count", "5", 5),
        ("count", '"5"', 5),
        ("count", "many", "many"),
        ("ratio", "1.5", 1.5),
        ("flag", "True", True),
        ("flag", "FALSE", False),
        ("items", "['a', 'b\n']", ["a", "b\n"]),
        ("anything", "5", 5),
        ("anything", "a b", "a b"),
        ("anything", '"a b"', "a b"),
        ("unknown", "[1]", [1]),
    ],
)
def test_a_value_is_what_the_whole_schema_makes_of_it(key: str, text: str, value: object) -> None:
    check("qwen3_coder", written(key, text), "ok", [("f", {key: value})])


TAGS: list[tuple[str, str, str, Calls]] = [
    (
        "qwen3_coder",
        "<function=f>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call> so",
        " so",
        [("f", {"s": "a"})],
    ),
    ("qwen3_coder", "<function=f>\n</function>", "", [("f", {})]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>", "", [("f", {})]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\na </function>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n<parameter=s>\nb\n</function>\n</tool_call>\n",
        "",
        [("f", {"s": "a </function>"}), ("g", {"s": "b"})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\nso\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "<tool_call>\nso",
        [("f", {})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=s>a</parameter><parameter=count>\n3"
        "</parameter>\n</function>\n</tool_call>",
        "",
        [("f", {"s": "a", "count": 3})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=s>\na</parameter>\n<parameter=count>3\n"
        "</parameter></function></tool_call>",
        "",
        [("f", {"s": "a", "count": 3})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n</function>\n<function=g>\n</function>\n</tool_call>",
        "",
        [("f", {}), ("g", {})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=h>\n</function>\n</tool_call>",
        "<tool_call>\n<function=h>\n</function>\n</tool_call>",
        [],
    ),
    (
        "glm45",
        "a\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a </arg_value> b </tool_call></arg_value>\n"
        "<arg_key>count</arg_key>"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
        "a",
        [("f", {"s": "a </arg_value> b </tool_call>", "count": 3}), ("g", {})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a </parameter> b\n</parameter>\n'
        '<parameter name="flag">true</parameter>\n</invoke>\n<invoke name="g">\n'
        "</invoke>\n</minimax:tool_call> so",
        " so",
        [("f", {"s": "a </parameter> b\n", "flag": True}), ("g", {})],
    ),
    (
        "hunyuan_v3",
        "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n</tool_call>\n"
        "<tool_call>g<tool_sep></tool_call>\n<tool_call>g\n</tool_call>\n</tool_calls>",
        "",
        [("f", {"s": "a"}), ("g", {}), ("g", {})],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), TAGS)
def test_calls_between_tags_are_read_with_their_faults(
    name: str, text: str, content: str, calls: Calls
) -> None:
    check(name, text, content, calls)
