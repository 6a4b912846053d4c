"""Features on their way from the target to a draft that reads them.

Committed tokens, as far as their features are concerned::

    [0, num_held)      the draft is known to have them
    [num_held, end)    they wait here, or are with an item in flight
    [end, ...)         the target is asked for them with the next Verify

A draft that was lost has none: all are asked for again, of the target, which keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass

from specray.feature_rows import ITEM_BYTES, FeatureRows, max_rows


@dataclass(slots=True)
class FeatureQueue:
    """Features of one session."""

    feature_size: int = 0
    """Numbers of a row; 0: the draft is to have none now."""
    num_held: int = 0
    """First tokens whose features the draft has."""
    waiting: FeatureRows | None = None
    """Features of the next tokens, which the draft is not known to have; None: there are none."""

    @property
    def end(self) -> int:
        """First tokens whose features have come."""
        return self.num_held if self.waiting is None else self.waiting.end

    @property
    def num_bytes(self) -> int:
        return 0 if self.waiting is None else len(self.waiting.data)

    @property
    def num_wanted(self) -> int:
        """Rows that may come next: one message's, while the one before is on its way to the draft."""
        if self.feature_size == 0:
            return 0
        most, num_waiting = max_rows(self.feature_size), self.end - self.num_held
        return max(0, min(most, 2 * most - num_waiting))

    def add(self, rows: FeatureRows) -> None:
        """Takes what came with a verdict; not what comes after a gap, is of another size, or has no room."""
        if rows.first > self.end or rows.row_bytes != ITEM_BYTES * self.feature_size:
            return
        new = rows.within(self.end, self.end + self.num_wanted)
        if new is not None:
            self.waiting = new if self.waiting is None else self.waiting.followed_by(new)

    def sent(self, end: int) -> FeatureRows | None:
        """What goes with an item after which the draft holds ``end`` tokens; it waits for the answer."""
        if self.waiting is None or self.feature_size == 0:
            return None
        return self.waiting.within(self.num_held, min(end, self.num_held + max_rows(self.feature_size)))

    def confirm(self, rows: FeatureRows | None) -> None:
        """The draft has answered an item that brought these."""
        if rows is not None and rows.end > self.num_held:
            self.num_held = rows.end
            if self.waiting is not None:
                self.waiting = self.waiting.within(rows.end, self.waiting.end)

    def lose(self) -> None:
        self.num_held, self.waiting = 0, None
