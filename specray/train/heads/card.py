"""The card of a trained head: every figure comes from its run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specray.train.draft.loss import LossConfig
from specray.train.draft.loss_kind import LossKind
from specray.train.heads.acceptance import DepthCounts, tokens_per_round
from specray.train.heads.base import DraftHead
from specray.train.heads.methods import Method, Target
from specray.train.heads.trainer import StepConfig
from specray.train.loop import RunState

_PREFIX = "held_out_"
_CARD = """# {title} for {target}

Drafts for `{target}` alone: `specray serve --target {target} {option} .` in this directory.

    {command}

- {num_parameters:,} parameters; {num_ids:,} of the target's {vocab_size:,} tokens can be drafted.
- {reads}
- Text: {num_rows:,} rows of {row_len:,} tokens that the target wrote, {num_answers:,} of them answers;
  {num_held_out} rows more were held out, and so were those of a file's prompts that they begin with.
- Loss of each place ahead: {loss}. From one place to the next it counts {depth_decay} times as much.

## Acceptance

On held-out answers, after {step:,} steps: the share of places where the head's most likely token is the
target's, of those whose earlier draft tokens all were. At these rates a greedy round with a chain of
{num_depths} gives {tokens_per_round:.2f} tokens if it begins at a random place. A server's mean is lower: its
rounds pass over what is easy in few steps, and so begin more often where it is hard.

| place ahead | {places} | tokens per round |
|---|{rules}|---|
{accepted}

## Training

Tokens per second are those of wall time, with saving and evaluation. Loss is that on held-out answers:
divergence and cross-entropy.

| steps | tokens | wall time | tokens/s | loss | tokens per round |
|---|---|---|---|---|---|
{rows}
"""


@dataclass(frozen=True, slots=True)
class Card:
    """What a card says whenever it is written."""

    method: Method
    steps: StepConfig
    target: Target
    target_name: str
    command: str
    num_held_out: int

    def text(
        self,
        head: DraftHead,
        state: RunState,
        figures: Mapping[str, float],
        domains: Mapping[str, Sequence[DepthCounts]],
    ) -> str:
        """The card's text.

        Args:
            state: of the run, now.
            figures: of the evaluation, now.
            domains: acceptance by domain and depth, of the same.
        """
        written, places = self.target.written, range(1, head.num_depths + 1)
        rate = state.num_tokens / max(state.elapsed_s, 1e-9)
        now = {
            "step": state.step,
            "num_tokens": state.num_tokens,
            "elapsed_s": state.elapsed_s,
            "tokens_per_s": rate,
            **figures,
        }
        log = self.target.work_dir / f"{self.method.name}.log.jsonl"
        return _CARD.format(
            title=self.method.title,
            target=self.target_name,
            option="--draft" if self.method.is_draft else "--drafter",
            command=self.command,
            num_parameters=sum(parameter.numel() for parameter in head.module.parameters()),
            num_ids=len(head.draft_ids),
            vocab_size=self.target.vocab_size,
            reads=_reads(head, self.target.num_layers),
            num_rows=len(written.token_ids),
            row_len=written.token_ids.shape[1],
            num_answers=int(written.is_answer.sum()),
            num_held_out=self.num_held_out,
            loss=_loss(self.steps.loss),
            depth_decay=self.steps.depth_decay,
            step=state.step,
            num_depths=head.num_depths,
            tokens_per_round=figures[f"{_PREFIX}tokens_per_round"],
            places=" | ".join(map(str, places)),
            rules="|".join("---" for _ in places),
            accepted="\n".join(_accepted(figures, places, domains)),
            rows="\n".join(_row(figures) for figures in [*_evaluations(log, before=state.step), now]),
        )


def _reads(head: DraftHead, num_layers: int) -> str:
    if not head.feature_layers:
        return "Reads token ids alone, and nothing of the target's."
    layers = ", ".join(map(str, head.feature_layers))
    return (
        f"Reads layers {layers} of the target: k is what enters layer k, {num_layers} what leaves the last\n"
        f"  one, and {num_layers + 1} what is behind its final norm."
    )


def _loss(loss: LossConfig) -> str:
    parts = {
        LossKind.KL: "the Kullback-Leibler divergence from the target's distribution",
        LossKind.KL_TV: (
            "the Kullback-Leibler divergence from the target's distribution, and in the last two fifths of\n"
            f"  the run {loss.distance_weight} times the total variation distance"
        ),
        LossKind.LK: (
            "the Kullback-Leibler divergence from the target's distribution with the weight\n"
            "  exp(-3 acceptance), and the total variation distance with the rest (LK)"
        ),
    }
    return f"{parts[loss.kind]}; and {loss.argmax_weight} times the\n  cross-entropy on its most likely token"


def _accepted(
    figures: Mapping[str, float], places: Sequence[int], domains: Mapping[str, Sequence[DepthCounts]]
) -> list[str]:
    """Rows of the table: all, then each domain where there are several."""
    together = [figures[f"{_PREFIX}accepted_{place}"] for place in places]
    rows = [_cells("accepted", together, figures[f"{_PREFIX}tokens_per_round"])]
    if len(domains) > 1:
        rows += [
            _cells(domain, [each.rate for each in counts], tokens_per_round(counts))
            for domain, counts in domains.items()
        ]
    return rows


def _cells(name: str, rates: Sequence[float], num_tokens: float) -> str:
    return f"| {name} | {' | '.join(f'{rate:.3f}' for rate in rates)} | {num_tokens:.2f} |"


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
