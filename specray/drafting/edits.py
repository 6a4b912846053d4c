"""Edits that an output made of its prediction: one that was made twice is most likely made throughout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_EDIT_LEN = 8
"""Most tokens that an edit replaces, and most that it puts in their place."""
MAX_EDITS = 64
MIN_SEEN = 2
"""Times that an edit must have been made before it is expected again."""


class Edit(NamedTuple):
    """Some tokens of a prediction, and those that the output has in their place; neither is empty."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    num_seen: int = 1


class Edits:
    """The edits made so far, one for equal ``before``: the latest. Of many, the oldest are forgotten."""

    def __init__(self) -> None:
        self._by_first: dict[int, dict[tuple[int, ...], Edit]] = {}
        self._order: list[tuple[int, ...]] = []

    def learn(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Remembers an edit, unless it is empty on one side or too long to be one of a name."""
        if not (1 <= len(before) <= MAX_EDIT_LEN and 1 <= len(after) <= MAX_EDIT_LEN):
            return
        edit = Edit(tuple(before), tuple(after))
        known = self._by_first.get(before[0], {}).get(edit.before)
        if known is not None and known.after == edit.after:
            edit = edit._replace(num_seen=known.num_seen + 1)
        self.forget(edit.before)
        self._by_first.setdefault(before[0], {})[edit.before] = edit
        self._order.append(edit.before)
        if len(self._order) > MAX_EDITS:
            self.forget(self._order[0])

    def forget(self, before: tuple[int, ...]) -> None:
        """Forgets the edit of these tokens, if there is one."""
        known = self._by_first.get(before[0])
        if known is None or known.pop(before, None) is None:
            return
        self._order.remove(before)
        if not known:
            del self._by_first[before[0]]

    def at(self, prediction: Sequence[int], place: int) -> Edit | None:
        """The longest edit to be expected of the tokens that the prediction has from ``place`` on."""
        if place >= len(prediction):
            return None
        known = self._by_first.get(prediction[place])
        if known is None:
            return None
        fitting = [
            edit
            for before, edit in known.items()
            if edit.num_seen >= MIN_SEEN and tuple(prediction[place : place + len(before)]) == before
        ]
        return max(fitting, key=lambda edit: len(edit.before), default=None)
