"""Ownership of an engine's sequences by streams, and the engine's names for them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

StreamT = TypeVar("StreamT")


class SequenceNames(Generic[StreamT]):
    """The engine's name of each sequence, by stream and request id.

    The name is the request id, the same in every process and log line, unless another stream's sequence has
    it.

    Args:
        is_shared: whether several routers use the engine, so that one request id in two streams means two
            sequences. False: a second stream that starts a sequence takes it over.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        # Each stream's least recently used sequence comes first.
        self._by_stream: dict[StreamT, dict[str, str]] = {}
        self._owners: dict[str, tuple[StreamT, str]] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._owners)

    def use(self, stream: StreamT, request_id: str) -> str | None:
        """Name of the stream's sequence, which becomes the most recently used; None: it owns none."""
        names = self._by_stream.get(stream)
        name = None if names is None else names.pop(request_id, None)
        if names is not None and name is not None:
            names[request_id] = name
        return name

    def add(self, stream: StreamT, request_id: str) -> str:
        """Makes the stream the owner of a new sequence; returns its name."""
        name = request_id
        if self._is_shared:
            while name in self._owners:
                name = f"{request_id}~{next(self._numbers)}"
        elif name in self._owners:
            self.remove(self._owners[name][0], [request_id])
        self._owners[name] = (stream, request_id)
        self._by_stream.setdefault(stream, {})[request_id] = name
        return name

    def of(self, stream: StreamT, request_ids: Iterable[str]) -> list[str]:
        """Names of those of the sequences that the stream owns."""
        names = self._by_stream.get(stream, {})
        return [names[request_id] for request_id in request_ids if request_id in names]

    def remove(self, stream: StreamT, request_ids: Iterable[str]) -> None:
        """Removes sequences of the stream; unknown ones are ignored."""
        names = self._by_stream.get(stream, {})
        for request_id in request_ids:
            name = names.pop(request_id, None)
            if name is not None:
                del self._owners[name]
        if not names:
            self._by_stream.pop(stream, None)

    def remove_stream(self, stream: StreamT) -> list[str]:
        names = list(self._by_stream.pop(stream, {}).values())
        for name in names:
            del self._owners[name]
        return names

    def give_way(self, stream: StreamT, needed: Collection[str]) -> list[str]:
        """Removes a sequence of the stream that owns most, for a stream that owns fewer; the engine is full.

        Shares only become more equal, so two streams do not take from each other in turns.

        Args:
            stream: stream that wants one more sequence.
            needed: names that must not be removed.

        Returns:
            The name of the least recently used sequence; none if shares are equal or all are needed.
        """
        if not self._is_shared:
            return []
        most = max(self._by_stream, key=lambda other: len(self._by_stream[other]), default=None)
        if most is None or len(self._by_stream[most]) <= len(self._by_stream.get(stream, {})) + 1:
            return []
        for request_id, name in self._by_stream[most].items():
            if name not in needed:
                self.remove(most, [request_id])
                return [name]
        return []
