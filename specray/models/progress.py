"""The seam to whoever watches a fetch: lines to read, and how far it is."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """Receives what happens while a model is fetched and converted."""

    def notice(self, line: str) -> None:
        """A line that the user should read."""

    def progress(self, what: str, done: int = 0, total: int | None = None) -> None:
        """The work that is under way.

        Args:
            what: names it; the same text again means the same work.
            done: bytes that are done.
            total: bytes of the whole; None: not known.
        """
