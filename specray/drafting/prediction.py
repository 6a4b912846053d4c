"""Prediction proposer: proposes the given text from where the output stands in it, and follows its edits.

An output that is an edit of its prediction leaves it and comes back. After a divergence the last output
tokens are looked for in the prediction, near the place where the output would be had it replaced token by
token: one token is enough near it, more are needed farther away. Until some tokens in a row have matched,
proposals are short, and the place of the divergence stays the middle of the search. Where the prediction is
of another text, each proposal in vain asks for a match twice as long before the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_EDIT_LEN = 8
"""Most tokens that an edit replaces, and most that it puts in their place."""
MAX_EDITS = 64


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
            if edit.num_seen >= 2 and tuple(prediction[place : place + len(before)]) == before
        ]
        return max(fitting, key=lambda edit: len(edit.before), default=None)


SURE_LEN = 3
"""Output tokens in a row that match the prediction, from which the output is taken to follow it."""
UNSURE_PROPOSAL_LEN = 8
"""Most tokens of a proposal until then."""
FIRST_PROPOSAL_LEN = 4
"""Most tokens of a proposal until SURE_LEN tokens of the prediction are part of the output: before, nothing
shows that they have anything to do with each other, and a long proposal costs as much as several steps."""
NEAR = 8
"""Tokens from the expected place within which a single equal token is a match."""
REACH = 96
"""Tokens from the expected place within which several equal tokens are a match."""
MAX_GUESSES = 2
"""Output tokens after a divergence at which the prediction is taken to have been replaced one for one."""
GRAM_LEN = 4
"""Output tokens by which a place anywhere in the prediction is found, when the output was lost for long."""
MAX_NEEDED = 12
"""Most tokens that must match before a proposal, after however many in vain."""
_TAIL_LEN = 16


class PredictionProposer:
    """Follows one output through its prediction."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = tuple(prediction)
        self._edits = Edits()
        self._output: list[int] = []
        """The last output tokens, as many as are compared."""
        self._place = 0
        """Index of the token that is expected next."""
        self._pending: tuple[int, ...] = ()
        """Tokens that are expected before it: the rest of an edit that the output is making again."""
        self._run = SURE_LEN
        """Output tokens in a row that were expected; the beginning counts as sure."""
        self._anchor = 0
        """Place after the last token of which it was sure."""
        self._since: list[int] = []
        """Output tokens since then."""
        self._left_place, self._left_since = 0, 0
        """Where the last run ended: in the prediction, and in the output since the anchor."""
        self._unmarked: list[int] = []
        """Places of the run's tokens that do not count as matched yet."""
        self._needed = 1
        """Tokens that must match before a proposal."""
        self._can_guess = True
        """No guess has failed since it was sure."""
        self._is_matched = bytearray(len(self._prediction))
        self._ends: dict[tuple[int, ...], list[int]] | None = None
        self.num_matched = 0
        """Tokens of the prediction that are part of the output so far."""

    @property
    def num_tokens(self) -> int:
        return len(self._prediction)

    @property
    def is_sure(self) -> bool:
        """The output follows the prediction, as far as is known."""
        return self._run >= max(SURE_LEN, self._needed) and self._place < len(self._prediction)

    @property
    def knows_place(self) -> bool:
        """Whether enough tokens have matched for a proposal, or few have been replaced since."""
        if self._place >= len(self._prediction) and not self._pending:
            return False
        if self._run > 0:
            return self._run >= self._needed
        # Right after a divergence: replaced one for one, most likely.
        return self._can_guess and self._needed == 1 and len(self._since) <= MAX_GUESSES

    @property
    def may_know_next(self) -> bool:
        """One output token more may be enough for a proposal, unless it is the end of a match found anew."""
        return self._needed == 1 or self._run + 1 >= self._needed

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes the next output tokens."""
        for token_id in token_ids:
            self._output.append(token_id)
            if len(self._output) > 2 * _TAIL_LEN:
                del self._output[:-_TAIL_LEN]
            self._since.append(token_id)
            place, was_guess = self._place, self._run == 0
            if not self._is_expected(token_id):
                if not was_guess:
                    self._left_place, self._left_since = place, len(self._since) - 1
                self._realign()
            elif was_guess:
                self._learn(place, 1)
            if self._run >= SURE_LEN:
                self._settle()

    def propose(self, k: int) -> tuple[int, ...]:
        """Returns at most ``k`` tokens to follow the output; empty where its place is not known."""
        if not self.knows_place:
            return ()
        most = k if self.is_sure else min(k, UNSURE_PROPOSAL_LEN)
        if self.num_matched < SURE_LEN:
            most = min(most, FIRST_PROPOSAL_LEN)
        tokens, place = list(self._pending), self._place
        while len(tokens) < most and place < len(self._prediction):
            edit = self._edits.at(self._prediction, place)
            if edit is None:
                tokens.append(self._prediction[place])
                place += 1
            else:
                tokens.extend(edit.after)
                place += len(edit.before)
        return tuple(tokens[:most])

    def observe(self, num_accepted: int) -> None:
        """Learns how many tokens of the last proposal were accepted, before the output goes on.

        A few, by chance, say nothing.
        """
        if self._run == 0:
            # It was a guess, whose failure says nothing of matches.
            self._can_guess = num_accepted > 0
        elif num_accepted == 0:
            self._needed = min(MAX_NEEDED, 2 * self._needed)
        elif num_accepted >= SURE_LEN:
            self._needed = 1

    # Where the output stands

    def _is_expected(self, token_id: int) -> bool:
        """Moves on where the token was expected. False: the output diverges here."""
        if self._pending:
            if self._pending[0] != token_id:
                self._pending = ()
                return False
            self._pending = self._pending[1:]
            self._run += 1
            return True
        edit = self._edits.at(self._prediction, self._place)
        if edit is not None and edit.after[0] == token_id:
            self._place += len(edit.before)
            self._pending = edit.after[1:]
            self._run += 1
            return True
        if self._place >= len(self._prediction) or self._prediction[self._place] != token_id:
            return False
        if edit is not None:
            # Not made here.
            self._edits.forget(edit.before)
        self._unmarked.append(self._place)
        self._place += 1
        self._run += 1
        return True

    def _settle(self) -> None:
        for place in self._unmarked:
            self.num_matched += not self._is_matched[place]
            self._is_matched[place] = True
        self._unmarked.clear()
        self._can_guess = True
        if not self._pending:
            self._anchor = self._place
            self._since.clear()

    def _realign(self) -> None:
        """Looks for the output's last tokens in the prediction; else supposes that tokens were replaced."""
        expected = self._anchor + len(self._since)
        end, length = self._nearest(expected) if len(self._since) <= REACH else self._anywhere(expected)
        if length == 0:
            end = min(expected, len(self._prediction))
        else:
            self._learn(end - length, length)
        self._place, self._run = end, length
        self._unmarked = list(range(end - min(length, len(self._since)), end))

    def _learn(self, place: int, length: int) -> None:
        """Remembers what was replaced before a match at ``place`` of ``length`` tokens.

        Even where it is not sure: only what is seen again counts, and names may stand two tokens apart.
        """
        after = self._since[self._left_since : len(self._since) - length]
        self._edits.learn(self._prediction[self._left_place : place], after)

    def _nearest(self, expected: int) -> tuple[int, int]:
        """The best match around the expected place: (index after it, length); length 0: there is none.

        The longest up to SURE_LEN tokens, of equally long ones the nearest; forwards where two are as near.
        """
        prediction, last = self._prediction, self._output[-1]
        low, high = max(1, expected - REACH), min(len(prediction), expected + REACH)
        best, found = (0, 0), (0, 0)
        for end in range(low, high + 1):
            if prediction[end - 1] != last:
                continue
            length, distance = self._match_len(end), abs(end - expected)
            if length == 1 and (distance > NEAR or end <= self._anchor):
                continue
            score = (min(length, SURE_LEN), -distance)
            if not found[1] or score >= best:
                best, found = score, (end, length)
        return found

    def _anywhere(self, expected: int) -> tuple[int, int]:
        """The nearest of the longest matches of GRAM_LEN tokens or more, as ``_nearest`` gives them."""
        if self._ends is None:
            self._ends = {}
            for end in range(GRAM_LEN, len(self._prediction) + 1):
                self._ends.setdefault(self._prediction[end - GRAM_LEN : end], []).append(end)
        ends = self._ends.get(tuple(self._output[-GRAM_LEN:]), ())
        return max(
            ((end, self._match_len(end)) for end in ends),
            key=lambda match: (match[1], -abs(match[0] - expected)),
            default=(0, 0),
        )

    def _match_len(self, end: int) -> int:
        """How many of the last output tokens equal those before ``end``, counted up to _TAIL_LEN."""
        most, length = min(end, len(self._output), _TAIL_LEN), 0
        while length < most and self._prediction[end - 1 - length] == self._output[-1 - length]:
            length += 1
        return length
