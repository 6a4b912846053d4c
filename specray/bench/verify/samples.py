"""Outputs under rejection verification, with the target's own distributions at their places."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from specray.bench.load.client import ServerClient
from specray.bench.plans import VerifyPlan
from specray.bench.verify.calibration import NUM_LIKELY, ScoredOutput
from specray.bench.verify.outputs import ask_answers, ask_outputs
from specray.bench.verify.plan import PLAIN, VerifyWay
from specray.errors import SpecrayError

_CHOICES_PER_CALL = 8
_NUM_SCORE_TOKENS = 1
"""Tokens that a request for scores generates: no service generates none."""


async def sampled_outputs(
    client: ServerClient, plan: VerifyPlan, prompts: Sequence[str], way: VerifyWay
) -> list[ScoredOutput]:
    """Samples from the model's own distribution, and then lets the service score prompt and output.

    The score is a forward of its own without drafts and without the prefix cache: it is right, whatever the
    tested way did to the cache. And outputs are drawn as most users' are, without logprobs. A score generates
    a token of its own: where the context has no room for it, the last token of an output is left out.

    Raises:
        NotOfferedError: the service does not offer the way. InvalidRequestError: it refuses to score.
        SpecrayError: it failed.
    """
    verification = {} if way.speculation is PLAIN else {"verification": "rejection"}
    outputs = await ask_outputs(
        client,
        [
            {"prompt": prompt, **_sampling(plan, index, start, {**way.speculation, **verification})}
            for index, prompt in enumerate(prompts)
            for start in range(0, plan.num_samples, _CHOICES_PER_CALL)
        ],
        concurrency=plan.concurrency,
        may_be_refused=way.may_be_refused,
    )
    max_model_len = await client.max_model_len()
    most = None if max_model_len is None else max_model_len - _NUM_SCORE_TOKENS
    texts = [(*output.prompt_token_ids, *output.token_ids)[:most] for output in outputs]
    answers = await ask_answers(client, [_scoring_body(text) for text in texts], concurrency=plan.concurrency)
    return [
        ScoredOutput(text, read_likely(answer, text[len(output.prompt_token_ids) :]))
        for output, text, answer in zip(outputs, texts, answers, strict=True)
    ]


def _sampling(plan: VerifyPlan, index: int, start: int, speculation: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "max_tokens": plan.max_tokens,
        # Distance to the seeds of other outputs: no two share noise.
        "seed": plan.seed + (1 << 20) + index * plan.num_samples + start,
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


def _scoring_body(text: Sequence[int]) -> dict[str, Any]:
    return {
        "prompt": list(text),
        "max_tokens": _NUM_SCORE_TOKENS,
        "temperature": 0,
        "prompt_logprobs": NUM_LIKELY,
        "speculation": PLAIN,
    }


def read_likely(answer: Mapping[str, Any], tokens: Sequence[int]) -> tuple[Mapping[int, float], ...]:
    """The likeliest tokens at the last places of a prompt, which hold these tokens."""
    choice, *_ = answer["choices"]
    places: Sequence[Mapping[str, Any]] = choice["prompt_logprobs"]
    last = itertools.islice(places, len(places) - len(tokens), None)
    return tuple(_ranked(place, token) for place, token in zip(last, tokens, strict=True))


def _ranked(place: Mapping[str, Any], token: int) -> dict[int, float]:
    """The service's list of a place, without the token that came where it stands beside the list.

    Its rank does not tell: where ranks count ties, it may have one of the list's.
    """
    entries = [
        (entry["rank"], int(token_id), float(entry["logprob"]))
        for token_id, entry in place.items()
        if len(place) <= NUM_LIKELY or int(token_id) != token
    ]
    ranked = sorted(entry for entry in entries if entry[0] is not None and entry[0] <= NUM_LIKELY)
    if len(entries) > NUM_LIKELY:
        raise SpecrayError(f"the server lists {len(entries)} likeliest tokens; asked for: {NUM_LIKELY}")
    return {token_id: logprob for _, token_id, logprob in ranked}
