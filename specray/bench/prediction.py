"""Measures predicted outputs: tokens/s of a pair with the target's own outputs, edited, as predictions.

One request at a time, greedy. The target alone writes each output first; then every arm asks for it, in
turns: without speculation, with the draft, and with a prediction before the draft.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from specray.config import Config
from specray.requests import GenerateRequest, SpeculationParams
from specray.router import Router
from specray.serving.local.pair import local_pair
from specray.tokenization import Tokenizer
from specray.types import SamplingParams

PLAIN: Final = "plain"
DRAFT: Final = "draft"
PREDICTIONS: Final = ("equal", "renamed", "edited", "renamed+edited", "unrelated")
"""Predictions by what was done to the output."""
SPAN: Final = (30, 60)
"""Tokens between two edits, at least and at most."""
MAX_EDIT_TOKENS: Final = 4
_NEW_NAME: Final = "renamed_value"
_WORD: Final = re.compile(r"[A-Za-z_]\w{2,}")


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """Figures of one arm over all prompts and turns."""

    arm: str
    tokens_per_s: float
    """Median over the turns."""
    speedup: float
    """Median over the turns of tokens/s over those of plain decoding in the same turn."""
    least_speedup: float
    """The least of them."""
    tokens_per_round: float
    accepted_share: float
    """Accepted over draft tokens, of all sources; 0: there were none."""
    num_equal: int
    """Outputs that are plain decoding's."""
    num_outputs: int


@dataclass(slots=True)
class _Tally:
    """Counts of one arm, and its tokens/s by turn."""

    rates: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_rounds: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_equal: int = 0
    num_outputs: int = 0


async def measure_prediction(
    config: Config,
    prompts: Sequence[tuple[int, ...]],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    num_repeats: int,
    seed: int,
    on_progress: Callable[[str], None],
) -> list[PredictionRow]:
    """Runs all arms over one pair.

    Args:
        config: of the pair; a draft is optional.
        prompts: at least two, since the output of another is the unrelated prediction.
        num_repeats: turns, in each of which every arm asks for every output.
        seed: of the edits.
        on_progress: told what begins.

    Raises:
        ConfigError, EngineLostError: see ``local_pair``.
        SpecrayError: a request failed.
    """
    assert len(prompts) >= 2, "another prompt's output is the unrelated prediction"
    arms = (PLAIN, *([DRAFT] if config.draft.has_model else []), *PREDICTIONS)
    tallies = {arm: _Tally() for arm in arms}
    async with local_pair(config) as pair:
        router = pair.router(config)
        await router.start()
        try:
            on_progress("the target alone")
            outputs = [(await _ask(router, prompt, PLAIN, (), max_tokens, 0))[0] for prompt in prompts]
            predictions = _predictions(outputs, tokenizer, seed)
            for turn in range(num_repeats):
                seconds, tokens = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
                for place, prompt in enumerate(prompts):
                    first = (turn + place) % len(arms)
                    for arm in (*arms[first:], *arms[:first]):
                        on_progress(f"turn {turn + 1} of {num_repeats}, prompt {place + 1}, {arm}")
                        predicted = predictions[place].get(arm, ())
                        started_s = time.monotonic()
                        output, tally = await _ask(
                            router, prompt, arm, predicted, max_tokens, turn * len(prompts) + place + 1
                        )
                        seconds[arm] += time.monotonic() - started_s
                        tokens[arm] += len(output)
                        _add(tallies[arm], tally, is_equal=output == outputs[place])
                for arm in arms:
                    tallies[arm].rates.append(tokens[arm] / seconds[arm])
        finally:
            await router.stop()
    return [_row(arm, tallies[arm], tallies[PLAIN].rates) for arm in arms]


async def _ask(
    router: Router,
    prompt: tuple[int, ...],
    arm: str,
    predicted: tuple[int, ...],
    max_tokens: int,
    number: int,
) -> tuple[tuple[int, ...], _Tally]:
    request = GenerateRequest(
        f"{arm}-{number}-{hash(prompt)}",
        prompt,
        SamplingParams(temperature=0.0, num_prompt_tokens=len(prompt)),
        max_tokens,
        speculation=SpeculationParams(enabled=arm != PLAIN, prediction=predicted),
    )
    output = await router.complete(request)
    stats = output.stats
    assert stats is not None, "the last chunk has them"
    num_tokens = len(output.token_ids)
    return output.token_ids, _Tally(
        num_tokens=num_tokens,
        num_rounds=num_tokens - stats.num_accepted_draft_tokens,
        num_drafts=stats.num_draft_tokens,
        num_accepted=stats.num_accepted_draft_tokens,
    )


def _predictions(
    outputs: Sequence[tuple[int, ...]], tokenizer: Tokenizer, seed: int
) -> list[dict[str, tuple[int, ...]]]:
    """The predictions of each output, by arm."""
    found = []
    for place, output in enumerate(outputs):
        source = random.Random(seed + place)
        other_name = renamed(output, tokenizer)
        found.append(
            {
                "equal": output,
                "renamed": other_name,
                "edited": edited(output, source),
                "renamed+edited": edited(other_name, source),
                "unrelated": outputs[(place + 1) % len(outputs)],
            }
        )
    return found


def renamed(output: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The output with its most frequent word replaced by another throughout."""
    text = tokenizer.decode(output)
    words = Counter(_WORD.findall(text))
    if not words:
        return output
    word = min(words, key=lambda each: (-words[each], each))
    return tokenizer.encode(re.sub(rf"\b{word}\b", _NEW_NAME, text), add_special_tokens=False)


def edited(output: Sequence[int], source: random.Random) -> tuple[int, ...]:
    """The output with tokens inserted, deleted or replaced every SPAN tokens; new ones are of its own."""
    result: list[int] = []
    place = 0
    while place < len(output):
        span, size = source.randint(*SPAN), source.randint(1, MAX_EDIT_TOKENS)
        result += output[place : place + span]
        place += span
        kind = source.choice(("insert", "delete", "replace"))
        if kind != "delete":
            result += [source.choice(output) for _ in range(size)]
        if kind != "insert":
            place += size
    return tuple(result)


def _add(total: _Tally, one: _Tally, *, is_equal: bool) -> None:
    total.num_tokens += one.num_tokens
    total.num_rounds += one.num_rounds
    total.num_drafts += one.num_drafts
    total.num_accepted += one.num_accepted
    total.num_equal += is_equal
    total.num_outputs += 1


def _row(arm: str, tally: _Tally, plain: Sequence[float]) -> PredictionRow:
    speedups = [rate / base for rate, base in zip(tally.rates, plain, strict=True)]
    return PredictionRow(
        arm,
        statistics.median(tally.rates),
        statistics.median(speedups),
        min(speedups),
        tally.num_tokens / tally.num_rounds,
        tally.num_accepted / tally.num_drafts if tally.num_drafts else 0.0,
        tally.num_equal,
        tally.num_outputs,
    )
