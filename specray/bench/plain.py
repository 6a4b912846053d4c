"""Measures plain decoding over HTTP against its bound: reading the target's weights once per token.

A running server gives one output at a time with speculation off; between its outputs, while it is idle, the
bound is measured in this process. They take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import itertools
import statistics
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.table import Table

from specray.bench.core.report import grid_of, number, values_of
from specray.bench.core.turns import in_turns
from specray.bench.forwards import ForwardCost
from specray.bench.load.client import ServerClient
from specray.bench.load.run import run_pass, send
from specray.bench.load.serve import PLAIN, request_body
from specray.bench.load.stats import Pass, RequestRecord
from specray.bench.plans import PlainPlan, ServePlan
from specray.environment import api_key
from specray.errors import ConfigError, SpecrayError

ROWS: Final = (1, 6)
"""Rows of the forwards: a token of plain decoding, and a round of speculation with K = 5."""


@dataclass(frozen=True, slots=True)
class PlainTurn:
    """One pass over the prompts, and the forwards measured before it."""

    tokens_per_s: float
    """Tokens/s of whole requests, with their prompts and first tokens."""
    token_ms: float
    """Median over the requests of milliseconds per output token after the first event."""
    one_row: ForwardCost
    six_rows: ForwardCost

    @property
    def figures(self) -> dict[str, float]:
        """Returns the figures by name, in the order of the report."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "token_ms": self.token_ms,
            "bound_ms": self.one_row.bound_ms,
            "http_share": self.one_row.bound_ms / self.token_ms,
            "forward_ms": self.one_row.forward_ms,
            "forward_share": self.one_row.share,
            "six_rows_ratio": self.six_rows.forward_ms / self.one_row.forward_ms,
            "bandwidth_gb_s": self.one_row.bandwidth_gb_s,
        }


@dataclass(frozen=True, slots=True)
class PlainResult:
    plan: PlainPlan
    model: str
    """Name of the model at the server."""
    turns: tuple[PlainTurn, ...]
    errors: tuple[str, ...]
    """Reasons why requests failed, which are not counted otherwise."""

    @property
    def medians(self) -> dict[str, float]:
        """Medians of each figure over the turns; for a share, the median of the shares."""
        names = self.turns[0].figures
        return {name: statistics.median(turn.figures[name] for turn in self.turns) for name in names}


def plain_json(result: PlainResult) -> dict[str, Any]:
    """Everything but the prompts, for ``--json``."""
    return {
        "model": result.model,
        "plan": values_of(result.plan),
        "turns": [
            {**turn.figures, "forwards": [values_of(cost) for cost in (turn.one_row, turn.six_rows)]}
            for turn in result.turns
        ],
        "medians": result.medians,
        "errors": list(result.errors),
    }


def token_ms(record: RequestRecord) -> float:
    """Returns the milliseconds per output token after the first event, to the end of the stream.

    Computed over the whole request: an event brings the tokens of some milliseconds, so the gaps between
    events say nothing of a token.

    Raises:
        SpecrayError: there was no text, or the server does not tell how many tokens the first event brought.
        ConfigError: no token came after it.
    """
    if not record.event_times_s:
        raise SpecrayError("an output has no text")
    if record.num_first_tokens is None:
        raise SpecrayError("events of the stream do not tell their usage (continuous_usage_stats)")
    num_tokens = record.num_output_tokens - record.num_first_tokens
    if num_tokens < 1:
        raise ConfigError(
            f"--max-tokens: an output had {record.num_output_tokens}, all in its first event; "
            f"allowed: {record.num_output_tokens + 1} and more"
        )
    return 1e3 * (record.ended_s - record.event_times_s[0]) / num_tokens


def make_turn(one: Pass, costs: Sequence[ForwardCost]) -> PlainTurn:
    """Combines a pass with the forwards of ``ROWS``. Raises like ``token_ms``."""
    one_row, six_rows = costs
    num_tokens = sum(record.num_output_tokens for record in one.records)
    return PlainTurn(
        tokens_per_s=num_tokens / one.duration_s,
        token_ms=statistics.median(token_ms(record) for record in one.records),
        one_row=one_row,
        six_rows=six_rows,
    )


async def served_model(url: str) -> str:
    """Returns the name of the one model that the server serves.

    Raises:
        ConfigError: there is no server, it does not say, or it serves several models.
    """
    try:
        async with ServerClient(url, key=api_key()) as client:
            names = await client.models()
    except SpecrayError as error:
        raise ConfigError(f"--url is {url}: {error}; allowed: the address of a running server") from None
    if len(names) != 1:
        raise ConfigError(
            f"--url is {url}, which serves {len(names)} models ({', '.join(names)}); allowed: 1"
        )
    return names[0]


async def measure_plain(
    plan: PlainPlan,
    prompts: Sequence[str],
    model: str,
    measure_forwards: Callable[[], Sequence[ForwardCost]],
    on_progress: Callable[[str, int, int], None],
) -> PlainResult:
    """Runs the plan's passes, one request at a time, each after a measurement of the target's forwards.

    Args:
        model: name of the model at the server.
        measure_forwards: measures forwards of ``ROWS`` in this process, while the server is idle.
        on_progress: called before each part with its name, and how many parts of how many are done.

    Raises:
        ConfigError: outputs are too short, or ``measure_forwards`` raised it.
        InvalidRequestError: the server refuses a warm-up request.
        EngineLostError: the server is away.
        SpecrayError: no request of a turn was answered.
    """
    turns: list[PlainTurn] = []
    errors: list[str] = []
    num_parts = 1 + len(prompts)
    asked = ServePlan(max_tokens=plan.max_tokens)
    run_id = uuid.uuid4().hex

    def bodies(label: str) -> list[dict[str, Any]]:
        # Stream options with token counts in each event: the first event may bring several tokens.
        own = {"model": model, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return [request_body(asked, PLAIN, prompt, f"{run_id}, {label}") | own for prompt in prompts]

    def show(name: str, num_done: int) -> None:
        on_progress(name, num_done, plan.num_turns * num_parts)

    for index, _, _ in in_turns([PLAIN], plan.num_turns):
        turn = index + 1
        parts = itertools.count((turn - 1) * num_parts + 1)
        show("forwards", (turn - 1) * num_parts)
        # Measured first: a wrong context length or checkpoint shows here.
        costs = measure_forwards()
        show("over HTTP", next(parts))
        # A new connection: servers close those that were idle during the forwards.
        async with ServerClient(plan.url, timeout_s=plan.timeout_s, key=api_key()) as client:
            for body in bodies(f"turn {turn}, warm-up")[: plan.num_warmup]:
                await send(client, body)
            one = await run_pass(
                client,
                bodies(f"turn {turn}"),
                concurrency=1,
                on_done=lambda parts=parts: show("over HTTP", next(parts)),  # type: ignore[misc]
            )
        if not one.measured.records:
            raise SpecrayError(f"no request of turn {turn} was answered: {one.errors[0]}")
        errors += one.errors
        turns.append(make_turn(one.measured, costs))
    return PlainResult(plan, model, tuple(turns), tuple(errors))


def plain_table(result: PlainResult, *, title: str) -> Table:
    """Makes a table with one column per turn, and their medians."""
    headings = ["", *(f"turn {turn + 1}" for turn in range(len(result.turns))), "median"]
    columns = [*(turn.figures for turn in result.turns), result.medians]
    rows = [
        (heading, *(number(figures[name], digits) for figures in columns))
        for name, (heading, digits) in _HEADINGS.items()
    ]
    caption = "bound: the linear layers alone at one row, in this process, in turns"
    return grid_of(title, headings, rows, caption=caption)


_HEADINGS: Final[Mapping[str, tuple[str, int]]] = {
    "tokens_per_s": ("tokens/s over HTTP", 1),
    "token_ms": ("ms per token over HTTP", 3),
    "bound_ms": ("bound ms", 3),
    "http_share": ("bound share over HTTP", 3),
    "forward_ms": ("forward ms, 1 row", 3),
    "forward_share": ("bound share of the forward", 3),
    "six_rows_ratio": ("6 rows over 1", 3),
    "bandwidth_gb_s": ("weights GB/s", 1),
}
