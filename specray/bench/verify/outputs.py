"""Outputs of a service as they are compared: token ids, logprobs, and where two of them part."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specray.bench.load.client import ServerClient
from specray.errors import InvalidRequestError, SpecrayError


class NotOfferedError(SpecrayError):
    """The service refuses the way to speculate that was asked for."""


@dataclass(frozen=True, slots=True)
class VerifiedOutput:
    """One output, with the logprob of each of its tokens where they were asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    text: str = ""
    prompt_token_ids: tuple[int, ...] = ()


def read_outputs(answer: Mapping[str, Any]) -> list[VerifiedOutput]:
    """Reads the choices of a completion with ``return_token_ids``."""
    return [
        VerifiedOutput(
            tuple(choice["token_ids"]),
            tuple((choice.get("logprobs") or {}).get("token_logprobs") or ()),
            choice.get("text") or "",
            tuple(choice.get("prompt_token_ids") or ()),
        )
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    ]


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of first tokens that two outputs share."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (own, other) in pairs if own != other), min(len(left), len(right)))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the outputs of an arm are those of plain decoding."""

    num_outputs: int
    num_diverged: int
    """Outputs with another token somewhere."""
    num_tokens: int
    """Tokens up to and with the first other one."""
    max_logprob_distance: float
    """Largest difference of a shared token's logprob; 0 without logprobs."""

    @property
    def divergences_per_1000(self) -> float:
        return 1e3 * self.num_diverged / max(1, self.num_tokens)


def agreement(plain: Iterable[VerifiedOutput], others: Iterable[VerifiedOutput]) -> Agreement:
    """Compares outputs one by one."""
    num_outputs = num_diverged = num_tokens = 0
    distance = 0.0
    for own, other in zip(plain, others, strict=True):
        common = num_common(own.token_ids, other.token_ids)
        is_diverged = own.token_ids != other.token_ids
        num_outputs += 1
        num_diverged += is_diverged
        num_tokens += common + is_diverged
        pairs = zip(own.logprobs[:common], other.logprobs[:common], strict=False)
        gaps = (abs(left - right) for left, right in pairs if math.isfinite(left) and math.isfinite(right))
        distance = max(distance, *gaps, 0.0)
    return Agreement(num_outputs, num_diverged, num_tokens, distance)


async def ask_outputs(
    client: ServerClient, bodies: Sequence[dict[str, Any]], *, concurrency: int, may_be_refused: bool = False
) -> list[VerifiedOutput]:
    """Asks for all outputs, ``concurrency`` at a time; they come in the order of the bodies.

    Args:
        may_be_refused: the service may have no way to do this, which its answer to the first body tells.

    Raises:
        NotOfferedError: it refused that one. InvalidRequestError: it refused another, or may not.
        SpecrayError: it failed.
    """
    answers = await ask_answers(client, bodies, concurrency=concurrency, may_be_refused=may_be_refused)
    return [output for answer in answers for output in read_outputs(answer)]


async def ask_answers(
    client: ServerClient, bodies: Sequence[dict[str, Any]], *, concurrency: int, may_be_refused: bool = False
) -> list[dict[str, Any]]:
    """Asks for all answers, like ``ask_outputs``. Raises like it."""
    answers: dict[int, dict[str, Any]] = {}
    waiting = iter(enumerate(bodies))

    async def work() -> None:
        for index, body in waiting:
            answers[index] = await client.complete(body)

    index, first = next(waiting)
    try:
        answers[index] = await client.complete(first)
    except InvalidRequestError as error:
        if may_be_refused:
            raise NotOfferedError(str(error)) from None
        raise
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [answers[index] for index in range(len(bodies))]
