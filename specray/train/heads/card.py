"""The card of a trained head: every figure comes from its run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from specray.train.draft.writing import Written
from specray.train.heads.base import Head
from specray.train.loop import RunState

_TITLES = {"eagle3": "An EAGLE-3 head", "medusa": "Medusa heads"}
_PREFIX = "held_out_"
_CARD = """# {title} for {target}

Drafts for `{target}` alone: `specray serve --target {target} --drafter .` in this directory.

    {command}

- {num_parameters:,} parameters; {num_ids:,} of the target's {vocab_size:,} tokens can be drafted.
- Reads layers {layers} of the target: k is what enters layer k, {num_layers} what leaves the last one, and
  {behind} what is behind its final norm.
- Text: {num_rows:,} rows of {row_len:,} tokens that the target wrote, {num_answers:,} of them answers;
  {num_held_out} rows more were held out.
- Loss of each place ahead: Kullback-Leibler divergence from the target's distribution, and {argmax_weight}
  times the cross-entropy on its most likely token; in the last two fifths of the run also {overlap_weight}
  times the total variation distance. From one place to the next it counts {depth_decay} times as much.

## Acceptance

On held-out answers, after {step:,} steps: the share of places where the head's most likely token is the
target's, of those whose earlier draft tokens all were. At these rates a greedy round with a chain of
{num_depths} gives {tokens_per_round:.2f} tokens.

| place ahead | {places} |
|---|{rules}|
| accepted | {accepted} |

## Training

Tokens per second are those of wall time, with saving and evaluation. Loss is that on held-out answers.

| steps | tokens | wall time | tokens/s | loss | tokens per round |
|---|---|---|---|---|---|
{rows}
"""


def card_text(
    head: Head,
    *,
    target: str,
    command: str,
    vocab_size: int,
    num_layers: int,
    written: Written,
    num_held_out: int,
    weights: Mapping[str, float],
    log: Path,
    state: RunState,
    figures: Mapping[str, float],
) -> str:
    """The card's text.

    Args:
        num_layers: of the target.
        weights: ``argmax_weight``, ``overlap_weight`` and ``depth_decay`` of the loss.
        log: the run's log so far, with earlier evaluations.
        state: of the run, now.
        figures: of the evaluation, now.
    """
    places = range(1, head.num_depths + 1)
    rate = state.num_tokens / max(state.elapsed_s, 1e-9)
    now = {
        "step": state.step,
        "num_tokens": state.num_tokens,
        "elapsed_s": state.elapsed_s,
        "tokens_per_s": rate,
        **figures,
    }
    return _CARD.format(
        title=_TITLES[head.name],
        target=target,
        command=command,
        num_parameters=sum(parameter.numel() for parameter in head.module.parameters()),
        num_ids=len(head.draft_ids),
        vocab_size=vocab_size,
        layers=", ".join(map(str, head.feature_layers)),
        num_layers=num_layers,
        behind=num_layers + 1,
        num_rows=len(written.token_ids),
        row_len=written.token_ids.shape[1],
        num_answers=int(written.is_answer.sum()),
        num_held_out=num_held_out,
        step=state.step,
        num_depths=head.num_depths,
        tokens_per_round=figures[f"{_PREFIX}tokens_per_round"],
        places=" | ".join(map(str, places)),
        rules="|".join("---" for _ in places),
        accepted=" | ".join(f"{figures[f'{_PREFIX}accepted_{place}']:.3f}" for place in places),
        rows="\n".join(_row(figures) for figures in [*_evaluations(log, before=state.step), now]),
        **weights,
    )


def _evaluations(log: Path, *, before: int) -> Sequence[Mapping[str, float]]:
    if not log.is_file():
        return []
    rows = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    return [row for row in rows if f"{_PREFIX}loss" in row and row["step"] < before]


def _row(figures: Mapping[str, float]) -> str:
    cells = (
        f"{figures['step']:,}",
        f"{figures['num_tokens']:,}",
        f"{figures['elapsed_s']:.0f} s",
        f"{figures['tokens_per_s']:.0f}",
        f"{figures[f'{_PREFIX}loss']:.3f}",
        f"{figures[f'{_PREFIX}tokens_per_round']:.2f}",
    )
    return f"| {' | '.join(cells)} |"
