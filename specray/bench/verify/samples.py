"""Outputs under rejection verification, with the target's own distributions at their places."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from specray.bench.load.client import ServerClient
from specray.bench.verify.calibration import NUM_LIKELY, ScoredOutput
from specray.bench.verify.outputs import Output, ask_answers, ask_outputs
from specray.bench.verify.plan import PLAIN, VerifyPlan, Way

_CHOICES_PER_CALL = 8
_FIRST_SEED = 1 << 20
"""Distance to the seeds of other outputs: no two share noise."""


async def sampled_outputs(client: ServerClient, plan: VerifyPlan, way: Way) -> list[ScoredOutput]:
    """Samples from the model's own distribution, and then lets the service score prompt and output.

    The score is a forward of its own without drafts and without the prefix cache: it is right, whatever the
    tested way did to the cache. And outputs are drawn as most users' are, without logprobs.

    Raises:
        InvalidRequestError: the service does not offer the way. SpecrayError: it failed.
    """
    verification = {} if way.speculation is PLAIN else {"verification": "rejection"}
    outputs = await ask_outputs(
        client,
        [
            _sampling_body(plan, index, start, {**way.speculation, **verification})
            for index in range(len(plan.prompts))
            for start in range(0, plan.num_samples, _CHOICES_PER_CALL)
        ],
        concurrency=plan.concurrency,
    )
    answers = await ask_answers(
        client, [_scoring_body(output) for output in outputs], concurrency=plan.concurrency
    )
    return [
        ScoredOutput(
            (*output.prompt_token_ids, *output.token_ids), _read_likely(answer, len(output.token_ids))
        )
        for output, answer in zip(outputs, answers, strict=True)
    ]


def _sampling_body(
    plan: VerifyPlan, index: int, start: int, speculation: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "prompt": plan.prompts[index],
        "max_tokens": plan.max_tokens,
        "seed": plan.seed + _FIRST_SEED + index * plan.num_samples + start,
        "n": min(_CHOICES_PER_CALL, plan.num_samples - start),
        "return_token_ids": True,
        "speculation": speculation,
        # Nothing between the model and the draw, whatever the defaults are. No output ends early, or
        # the token that ended it would be missing.
        "temperature": 1,
        "top_p": 1,
        "top_k": 0,
        "min_p": 0,
        "repetition_penalty": 1,
        "ignore_eos": True,
    }


def _scoring_body(output: Output) -> dict[str, Any]:
    return {
        "prompt": [*output.prompt_token_ids, *output.token_ids],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": NUM_LIKELY,
        "speculation": PLAIN,
    }


def _read_likely(answer: Mapping[str, Any], num_tokens: int) -> tuple[Mapping[int, float], ...]:
    """The likeliest tokens at the last places of a prompt; one that came and is none of them is left out."""
    choice, *_ = answer["choices"]
    places: Sequence[Mapping[str, Any]] = choice["prompt_logprobs"]
    return tuple(_ranked(place) for place in itertools.islice(places, len(places) - num_tokens, None))


def _ranked(place: Mapping[str, Any]) -> dict[int, float]:
    entries = [(entry["rank"], int(token_id), float(entry["logprob"])) for token_id, entry in place.items()]
    ranked = sorted(entry for entry in entries if entry[0] is not None and entry[0] <= NUM_LIKELY)
    return {token_id: logprob for _, token_id, logprob in ranked}
