"""The output items of one response as they grow, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from specray.serving.http.responses import Json
from specray.serving.tools.answer import AnswerDelta, CallDelta

_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS: Final = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of the only part of an item's content, and the name of its events, by the item's type."""


class Output:
    """The items of one response.

    Args:
        key: what the ids of items end with.
    """

    def __init__(self, key: str) -> None:
        self.items: list[Json] = []
        self._key = key
        self._is_open = False
        self._texts: list[str] = []
        """Pieces of the open item's text."""
        self._logprobs: list[Json] = []
        """Logprobs of the open message."""
        self._waiting: list[Json] = []
        """Logprobs of tokens that have brought no text yet."""

    def add(self, read: AnswerDelta, logprobs: list[Json]) -> Iterator[Json]:
        """Yields the events of what the answer has gained. ``logprobs``: of tokens outside the reasoning."""
        self._waiting += logprobs
        for call in read.continued:
            yield from self._call(call)
        if read.reasoning:
            yield from self._grow("reasoning", read.reasoning)
        if read.content:
            yield from self._grow("message", read.content)
        for call in read.begun:
            yield from self._call(call)

    def end(self, *, is_complete: bool) -> Iterator[Json]:
        if not self.items:
            yield from self._open("message")
        yield from self.close(is_complete=is_complete)

    def close(self, *, is_complete: bool = True) -> Iterator[Json]:
        if not self._is_open:
            return
        item = self.items[-1]
        kind = item["type"]
        if kind == "function_call":
            # Its last part would have closed it.
            yield from self._close_call(is_complete=False)
            return
        if kind == "message":
            self._take_logprobs()
        self._is_open = False
        part = self._part(kind)
        told = {"logprobs": self._logprobs} if kind == "message" else {}
        item |= {"status": "completed" if is_complete else "incomplete", "content": [part]}
        yield self._event(f"response.{_PARTS[kind]}.done", **self._place(), text=part["text"], **told)
        yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._event("response.output_item.done", item=item)

    def _grow(self, kind: str, text: str) -> Iterator[Json]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self.close()
            yield from self._open(kind)
        self._texts.append(text)
        told = {"logprobs": self._take_logprobs()} if kind == "message" else {}
        yield self._event(f"response.{_PARTS[kind]}.delta", **self._place(), delta=text, **told)

    def _open(self, kind: str) -> Iterator[Json]:
        self._is_open, self._texts, self._logprobs = True, [], []
        item: Json = {"id": self._item_id(kind), "type": kind, "status": "in_progress"}
        own: Json = {"role": "assistant"}
        if kind == "reasoning":
            own = {"summary": [], "encrypted_content": None}
        item |= own
        self.items.append(item)
        yield self._event("response.output_item.added", item={**item, "content": []})
        yield self._event("response.content_part.added", **self._place(), part=self._part(kind))

    def _take_logprobs(self) -> list[Json]:
        """The logprobs that wait, which stay with the open message."""
        taken, self._waiting = self._waiting, []
        self._logprobs += taken
        return taken

    def _call(self, delta: CallDelta) -> Iterator[Json]:
        self._waiting = []  # Of the call's own tokens.
        if delta.is_first:
            yield from self.close()
            yield from self._open_call(delta)
        item, name = self.items[-1], "response.function_call_arguments"
        self._texts.append(delta.arguments)
        if delta.arguments:
            yield self._event(f"{name}.delta", item_id=item["id"], delta=delta.arguments)
        if delta.is_last:
            yield from self._close_call(is_complete=True)

    def _open_call(self, delta: CallDelta) -> Iterator[Json]:
        self._is_open, self._texts = True, []
        item = {
            "id": self._item_id("function_call"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": delta.call_id,
            "name": delta.name,
            "arguments": "",
        }
        self.items.append(item)
        yield self._event("response.output_item.added", item={**item})

    def _close_call(self, *, is_complete: bool) -> Iterator[Json]:
        self._is_open = False
        item, arguments = self.items[-1], "".join(self._texts)
        item |= {"status": "completed" if is_complete else "incomplete", "arguments": arguments}
        name = "response.function_call_arguments.done"
        yield self._event(name, item_id=item["id"], name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", item=item)

    def _event(self, kind: str, **fields: object) -> Json:
        return {"type": kind, "output_index": len(self.items) - 1, **fields}

    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "content_index": 0}

    def _part(self, kind: str) -> Json:
        part: Json = {"type": _PARTS[kind], "text": "".join(self._texts)}
        return part | ({"annotations": [], "logprobs": self._logprobs} if kind == "message" else {})

    def _item_id(self, kind: str) -> str:
        return f"{_PREFIXES[kind]}_{self._key}_{len(self.items)}"
