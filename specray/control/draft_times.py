"""What the draft takes for proposals: steps, in each of which those grow that have not ended, and the rest.

    seconds = factor * sum over steps of shape(rows in it) + overhead * sqrt(proposals)

The shape is what the draft says of itself, measured with nothing else going on. The first step has a row for
each token that was committed since the last; a further one of the same proposal shares its context and counts
for half. Factor and overhead are fitted to what it takes here (recursive least squares that forgets, of
relative errors). The overhead is of beginning (caches are cold then) and of what each proposal needs besides.
How much is which, answers to about as many proposals do not tell; by the root, what one alone took is neither
believed of each of many, nor of all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from specray.control.estimators import TimeTable

_FADING = 0.97
"""Per answer. A hundred of them are some seconds."""
_BELIEF = 0.1
"""In answers, that the factor is one and the overhead none."""
_LEAST_FACTOR = 0.1
_FURTHER_SHARE = 0.5
"""Of a proposal's row, a further token that it begins with."""
_MAX_SURPRISE = 3.0
"""An answer counts as no more than so many times what it was believed to take."""


def first_rows(num_proposals: int, num_tokens: float) -> int:
    """Rows that count of the first step, when each proposal begins with so many tokens."""
    return round(num_proposals * (1 + _FURTHER_SHARE * max(0.0, num_tokens - 1)))


class DraftTimes:
    """Seconds per step, and of what else proposals take."""

    _factor: float
    _overhead: float
    """In steps of one proposal."""
    # Sums of products of both regressors and of the answer, which is one.
    _steps_steps: float
    _steps_rest: float
    _rest_rest: float
    _steps_answer: float
    _rest_answer: float

    def __init__(self) -> None:
        self._shape = TimeTable()
        self._forget()

    def expect(self, seconds_by_number: Mapping[int, float]) -> None:
        """What the draft says that a step takes, by the proposals in it."""
        self._shape.expect(seconds_by_number)
        # Another draft may say so: what the last one took tells nothing of it.
        self._forget()

    def step_s(self, num_proposals: int) -> float | None:
        """Of a step in which so many grow; None: nothing is known."""
        shape = self._shape.predict(max(1, num_proposals))
        return None if shape is None else self._factor * shape

    def reading_s(self, num_proposals: int, num_tokens: float) -> float:
        """What the first step takes longer for reading so many tokens of each proposal, not one."""
        first, read = self.step_s(num_proposals), self.step_s(first_rows(num_proposals, num_tokens))
        return 0.0 if first is None or read is None else max(0.0, read - first)

    def overhead_s(self, num_proposals: int) -> float:
        """What so many proposals take besides their steps."""
        return self._overhead * math.sqrt(num_proposals) * (self._shape.predict(1) or 0.0)

    def add(self, num_steps: Sequence[int], seconds: float, *, num_read: int = 0) -> None:
        """Takes what answered proposals, and nothing else.

        Args:
            num_steps: of each proposal; at least one has some.
            seconds: more than 0.
            num_read: tokens that all proposals began with together; 0: one each.
        """
        most = max(num_steps)
        if self._shape.predict(1) is None:
            # As good as any: all that is known.
            self.expect({1: seconds / most})
        unit = self._shape.predict(1) or 0.0
        lines = [sum(steps > index for steps in num_steps) for index in range(most)]
        lines[0] = max(lines[0], first_rows(len(num_steps), num_read / len(num_steps)))
        steps_s = sum(self._shape.predict(count) or 0.0 for count in lines)
        rest_s = unit * math.sqrt(len(num_steps))
        believed_s = self._factor * steps_s + self._overhead * rest_s
        seconds = min(seconds, _MAX_SURPRISE * believed_s) if believed_s > 0 else seconds
        if seconds <= 0 or unit <= 0:
            return
        steps, rest = steps_s / seconds, rest_s / seconds
        self._steps_steps = _FADING * self._steps_steps + steps * steps
        self._steps_rest = _FADING * self._steps_rest + steps * rest
        self._rest_rest = _FADING * self._rest_rest + rest * rest
        self._steps_answer = _FADING * self._steps_answer + steps
        self._rest_answer = _FADING * self._rest_answer + rest
        self._fit()

    def _forget(self) -> None:
        self._factor, self._overhead = 1.0, 0.0
        self._steps_steps = self._steps_rest = self._rest_rest = 0.0
        self._steps_answer = self._rest_answer = 0.0

    def _fit(self) -> None:
        first, second, mixed = self._steps_steps + _BELIEF, self._rest_rest + _BELIEF, self._steps_rest
        answer = self._steps_answer + _BELIEF
        determinant = first * second - mixed * mixed
        overhead = (first * self._rest_answer - mixed * answer) / determinant
        factor = (second * answer - mixed * self._rest_answer) / determinant
        if overhead < 0:
            overhead, factor = 0.0, answer / first
        elif factor < _LEAST_FACTOR:
            factor = _LEAST_FACTOR
            overhead = max(0.0, (self._rest_answer - mixed * factor) / second)
        self._factor, self._overhead = factor, overhead
