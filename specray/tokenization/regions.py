"""Finds regions of an answer, such as reasoning or tool calls, in text that comes in pieces of any size.

transformers' ``ResponseParser`` does the work: patterns that may still grow are held back, everything else is
told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_OUTSIDE: Final = "content"


@dataclass(frozen=True, slots=True)
class Region:
    """One kind of region."""

    opening: str
    """Text behind which the region begins."""
    close: str | None
    """Text that ends it; None: the end of the answer."""
    is_pattern: bool = False
    """``opening`` is a regular expression; it waits for one more character, which might belong to it."""


@dataclass(frozen=True, slots=True)
class RegionEvent:
    """What more text has brought."""

    region: str | None
    """Name of the region; None: text outside all regions."""
    text: str
    is_end: bool = False
    """The region has ended; ``text`` is empty."""


class RegionParser:
    """Reads one answer.

    Args:
        regions: by name.
        prefix: text before the answer that may have opened a region.
    """

    def __init__(self, regions: Mapping[str, Region], *, prefix: str = "") -> None:
        from transformers.utils.chat_parsing import ResponseParser

        fields: dict[str, dict[str, Any]] = {_OUTSIDE: {"content": "text", "content_args": {"strip": False}}}
        for name, region in regions.items():
            kind = "open_pattern" if region.is_pattern else "open"
            fields[name] = {kind: region.opening, "repeats": True, "content": "text"}
            if region.close is not None:
                fields[name]["close"] = region.close
        # The anchor is never found: the whole prefix is what the parser has to know.
        template = {"defaults": {}, "start_anchor": "\0", "fields": fields}
        self._parser = ResponseParser(template, prefix=prefix)
        self._open = _OUTSIDE
        self._events(self._parser.initial_events)

    @property
    def region(self) -> str | None:
        """Name of the region that is open; None: outside all regions."""
        return None if self._open == _OUTSIDE else self._open

    def push(self, text: str) -> list[RegionEvent]:
        """What more text brings; text that may begin a region is held back."""
        return self._events(self._parser.feed(text))

    def finish(self) -> list[RegionEvent]:
        """What was held back, and the end of the region that is open."""
        return self._events(self._parser.finalize()[1])

    def _events(self, events: list[dict[str, Any]]) -> list[RegionEvent]:
        found = []
        for event in events:
            region = None if event["field"] == _OUTSIDE else event["field"]
            if event["type"] == "region_open":
                self._open = event["field"]
            elif event["type"] == "region_chunk":
                found.append(RegionEvent(region, event["text"]))
            elif event["type"] == "region_close":
                self._open = _OUTSIDE
                if region is not None:
                    found.append(RegionEvent(region, "", is_end=True))
        return found
