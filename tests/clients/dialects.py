"""How models write calls: the text of an answer, as a grammar that makes any model write it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.clients.checks import Server

Written = tuple[str, Mapping[str, str]]
"""Name and arguments of a call."""
_MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "harmony": (
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|call|>",
        "<|return|>",
        "<|end|>",
        "<|start|>",
    ),
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """A format of calls, and the ids of its control tokens."""

    name: str
    ids: Mapping[str, int]

    def grammar(self, call: Written | None, text: str | None) -> str:
        """A Lark grammar of the one answer that has this call, or this text."""
        if self.name == "harmony":
            answer = _harmony(call, text or "")
        else:
            answer = (text or "") if call is None else self._tagged(*call)
        return "start: " + " ".join(self._terminals(answer))

    def without_thinking(self, fields: dict[str, Any]) -> None:
        """The model's template begins no thought, which no grammar bounds."""
        if self.name == "qwen3_coder":
            fields["chat_template_kwargs"] = {"enable_thinking": False}
            fields.pop("thinking", None)

    def _tagged(self, name: str, arguments: Mapping[str, str]) -> str:
        if self.name == "hermes":
            written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        else:
            values = "".join(
                f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
            )
            written = f"<function={name}>\n{values}</function>"
        return f"I will.\n<tool_call>\n{written}\n</tool_call>"

    def _terminals(self, answer: str) -> list[str]:
        parts = list[str]()
        while answer:
            place, mark = min(
                ((answer.find(mark), mark) for mark in self.ids if mark in answer), default=(-1, "")
            )
            if not mark:
                return [*parts, json.dumps(answer, ensure_ascii=False)]
            if place:
                parts.append(json.dumps(answer[:place], ensure_ascii=False))
            parts.append(f"<[{self.ids[mark]}]>")
            answer = answer[place + len(mark) :]
        return parts


def _harmony(call: Written | None, text: str) -> str:
    thought = "<|channel|>analysis<|message|>I will.<|end|><|start|>assistant"
    if call is None:
        return f"{thought}<|channel|>final<|message|>{text}<|return|>"
    name, arguments = call
    written = json.dumps(arguments, ensure_ascii=False)
    return f"{thought}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{written}<|call|>"


def dialect_of(server: Server) -> Dialect:
    """The dialect of the model's chat template."""
    template = str(_ask(server, "/tokenizer_info").get("chat_template"))
    name = "harmony" if "<|channel|>" in template else "hermes"
    name = "qwen3_coder" if "<parameter=" in template else name
    ids = {}
    for mark in _MARKS[name]:
        asked = {"model": server.model, "prompt": mark, "add_special_tokens": False}
        tokens = _ask(server, "/tokenize", asked)["tokens"]
        if len(tokens) == 1:
            ids[mark] = tokens[0]
    return Dialect(name, ids)


def _ask(server: Server, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(server.url + path, data, headers), timeout=60
    ) as answer:
        values: dict[str, Any] = json.loads(answer.read())
    return values
