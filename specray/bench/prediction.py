"""Measures predicted outputs: tokens/s of a pair with the target's own outputs, edited, as predictions.

One request at a time, greedy. The target alone writes each output first; then every arm asks for it, in
turns: without speculation, with the draft, and with a prediction before the draft.
"""

from __future__ import annotations

import random
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from specray.bench.core.figures import Tally
from specray.bench.core.service import ask_all, request_of, running, timed
from specray.bench.core.turns import in_turns
from specray.bench.load.prompts import load_prompts
from specray.config import Config
from specray.requests import SpeculationParams
from specray.serving.local.pair import local_pair
from specray.tokenization import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from specray.bench.plans import PredictionPlan

PLAIN: Final = "plain"
DRAFT: Final = "draft"
PREDICTIONS: Final = ("equal", "renamed", "edited", "renamed+edited", "unrelated")
"""Predictions by what was done to the output."""
SPAN: Final = (30, 60)
"""Tokens between two edits, at least and at most."""
MAX_EDIT_TOKENS: Final = 4
_WORD: Final = re.compile(r"[A-Za-z_]\w{2,}")


@dataclass(frozen=True, slots=True)
class PredictionRow:
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

    @classmethod
    def of(cls, arm: str, tally: Tally, plain: Tally) -> PredictionRow:
        """The figures of a tally, compared with plain decoding's."""
        speedups = tally.speedups(plain)
        return cls(
            arm,
            tally.tokens_per_s,
            statistics.median(speedups),
            min(speedups),
            tally.tokens_per_round,
            tally.num_accepted / tally.num_drafts if tally.num_drafts else 0.0,
            tally.num_equal,
            tally.num_outputs,
        )


async def measure_prediction(
    config: Config, plan: PredictionPlan, on_progress: Callable[[str], None]
) -> list[PredictionRow]:
    """Runs all arms over one pair; the output of another prompt is the unrelated prediction.

    Args:
        config: of the pair; a draft is optional.
        on_progress: called with what begins.

    Raises:
        ConfigError, EngineLostError: see ``local_pair``.
        SpecrayError: a request failed.
    """
    tokenizer = load_tokenizer(config.target.model)
    texts = load_prompts(plan.dataset, plan.dataset_path, plan.num_prompts)
    prompts = [tokenizer.encode(text) for text in texts]
    num_repeats, max_tokens = plan.num_repeats, plan.max_tokens
    arms = (PLAIN, *([DRAFT] if config.draft.has_model else []), *PREDICTIONS)
    tallies = {arm: Tally() for arm in arms}
    async with local_pair(config) as pair, running(pair, config) as router:
        on_progress("the target alone")
        requests = [
            request_of(f"output-{place}", prompt, max_tokens, speculation=SpeculationParams(enabled=False))
            for place, prompt in enumerate(prompts)
        ]
        outputs = [output.token_ids for output in await ask_all(router, requests, concurrency=1)]
        predictions = _predictions(outputs, tokenizer, plan.seed)
        for turn, place, arm in in_turns(arms, num_repeats, num_places=len(prompts), is_rotated=True):
            tally = tallies[arm]
            on_progress(f"turn {turn + 1} of {num_repeats}, prompt {place + 1}, {arm}")
            if place == 0:
                tally.begin_turn()
            predicted = SpeculationParams(enabled=arm != PLAIN, prediction=predictions[place].get(arm, ()))
            name = f"{arm}-{turn}-{place}"
            request = request_of(name, prompts[place], max_tokens, speculation=predicted)
            (output,), seconds = await timed(router, [request])
            tally.add_output(output, seconds=seconds, is_equal=output.token_ids == outputs[place])
    return [PredictionRow.of(arm, tallies[arm], tallies[PLAIN]) for arm in arms]


def _predictions(
    outputs: Sequence[tuple[int, ...]], tokenizer: Tokenizer, seed: int
) -> list[dict[str, tuple[int, ...]]]:
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
    return tokenizer.encode(re.sub(rf"\b{word}\b", "renamed_value", text), add_special_tokens=False)


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
