"""Measures what a draft proposes at each place of given outputs, and where it would stop.

The draft is told an output token by token, as if each had been committed alone, and asked after each. So it
is known for every token whether the draft would have proposed it, whatever the rounds were; and how far the
draft goes from there under several bounds, of which a router may use any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from specray.control.goodput import ANY_K
from specray.errors import EngineLostError
from specray.interfaces import Drafter
from specray.planning.profile import LENGTH_DIGITS, MeasuredOutput, ProposalLengths
from specray.requests import GenerateRequest, OutputChunk
from specray.types import Proposal, SamplingParams, SpeculateItem

BOUNDS: Final = (0.05, 0.12, 0.25, 0.45, 0.7, 0.9)
"""Bounds of acceptance at which the draft is asked; lengths are interpolated between them."""
LONGEST: Final = ANY_K
_SIDE_BY_SIDE = 16
_ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class WrittenOutput:
    """An output of the target, not empty, and its sampling parameters."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    sampling: SamplingParams


def written(requests: Sequence[GenerateRequest], outputs: Sequence[OutputChunk]) -> list[WrittenOutput]:
    """The outputs of requests, in their order."""
    return [
        WrittenOutput(request.prompt_token_ids, output.token_ids, request.sampling)
        for request, output in zip(requests, outputs, strict=True)
    ]


@dataclass(slots=True)
class _Reading:
    request_id: str
    output: WrittenOutput
    min_acceptance: float
    agreements: list[bool] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return len(self.lengths) < len(self.output.tokens)

    def item(self) -> SpeculateItem:
        """Returns the question for the next place."""
        place, output = len(self.lengths), self.output
        base_len = len(output.prompt) + place - 1 if place else 0
        new = output.tokens[place - 1 : place] if place else output.prompt
        sampling = None if place else output.sampling
        return SpeculateItem(
            self.request_id,
            place + 1,
            base_len,
            new,
            LONGEST,
            sampling=sampling,
            min_acceptance=self.min_acceptance,
        )

    def take(self, drafts: Sequence[int]) -> None:
        self.agreements.append(drafts[:1] == self.output.tokens[len(self.lengths) : len(self.lengths) + 1])
        # At its maximum length a draft proposes nothing.
        self.lengths.append(max(1, len(drafts)))


async def read_proposals(drafter: Drafter, outputs: Sequence[WrittenOutput]) -> list[MeasuredOutput]:
    """Asks the draft at each place of each output; returns results in the order of ``outputs``.

    Args:
        drafter: a connection to a draft that serves nobody else meanwhile.
        outputs: outputs of the target.

    Raises:
        EngineLostError: the draft was lost, took too long, or refused a question.
    """
    measured: list[MeasuredOutput] = []
    for start in range(0, len(outputs), _SIDE_BY_SIDE):
        part = outputs[start : start + _SIDE_BY_SIDE]
        by_bound = []
        for bound in BOUNDS:
            readings = [_Reading(f"output-{bound:g}-{n}", one, bound) for n, one in enumerate(part)]
            by_bound.append(await _read(drafter, readings))
        measured += [_measured(readings) for readings in zip(*by_bound, strict=True)]
    return measured


async def _read(drafter: Drafter, readings: list[_Reading]) -> list[_Reading]:
    while still := {one.request_id: one for one in readings if one.is_open}:
        for proposal in await asked(drafter, [one.item() for one in still.values()]):
            still[proposal.request_id].take(proposal.draft.token_ids)
    await drafter.release([one.request_id for one in readings])
    return readings


async def asked(drafter: Drafter, items: Sequence[SpeculateItem]) -> list[Proposal]:
    """Returns a proposal for each item, in the order of the answers.

    Raises:
        EngineLostError: the draft was lost, took too long, or refused a question.
    """
    await drafter.speculate(items)
    proposals: list[Proposal] = []
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            while len(proposals) < len(items):
                for reply in (await drafter.replies()).replies:
                    if not isinstance(reply, Proposal):
                        raise EngineLostError(f"the draft refused to propose: {type(reply).__name__}")
                    proposals.append(reply)
    except TimeoutError:
        raise EngineLostError(f"the draft was silent for {_ANSWER_TIMEOUT_S:g} s") from None
    return proposals


def _measured(readings: Sequence[_Reading]) -> MeasuredOutput:
    output = readings[0].output
    prompt, tokens = _numbered(output.prompt, output.tokens)
    return MeasuredOutput(
        prompt=prompt,
        tokens=tokens,
        agreements="".join("01"[agrees] for agrees in readings[0].agreements),
        lengths=tuple(
            ProposalLengths(
                min_acceptance=one.min_acceptance,
                by_position="".join(LENGTH_DIGITS[length] for length in one.lengths),
            )
            for one in readings
        ),
    )


def _numbered(prompt: Sequence[int], tokens: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers the tokens, so that equal tokens have equal numbers and nothing else is told."""
    names: dict[int, int] = {}
    named = tuple(names.setdefault(token, len(names) + 1) for token in (*prompt, *tokens))
    return named[: len(prompt)], named[len(prompt) :]
