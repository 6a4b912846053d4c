"""Measures plain decoding over HTTP against its bound: reading the target's weights once per token.

A running server gives one output at a time with speculation off; between its outputs, while it is idle, the
bound is measured in this process. They take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.table import Table

from specray.bench.forwards import ForwardCost
from specray.bench.load.client import ServerClient
from specray.bench.load.run import run_pass, send
from specray.bench.load.serve import ServeArm, ServePlan, request_body
from specray.bench.load.stats import Pass, RequestRecord
from specray.environment import api_key
from specray.errors import ConfigError, SpecrayError

PLAIN: Final = ServeArm("plain", {"enabled": False})
ROWS: Final = (1, 6)
"""Rows of the forwards: a token of plain decoding, and a round of speculation with K = 5."""
STREAM_OPTIONS: Final = {"include_usage": True, "continuous_usage_stats": True}
"""Stream options with token counts in each event: the first event may bring several tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
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
    """Results of a whole run."""

    plan: ServePlan
    model: str
    """Name of the model at the server."""
    turns: tuple[Turn, ...]
    errors: tuple[str, ...]
    """Reasons why requests failed, which are not counted otherwise."""

    @property
    def medians(self) -> dict[str, float]:
        """Medians of each figure over the turns; for a share, the median of the shares."""
        names = self.turns[0].figures
        return {name: statistics.median(turn.figures[name] for turn in self.turns) for name in names}

    def as_json(self) -> dict[str, Any]:
        """Returns everything but the prompts, for ``--json``."""
        plan = {key: value for key, value in asdict(self.plan).items() if key not in ("prompts", "arms")}
        return {
            "model": self.model,
            "plan": {**plan, "num_prompts": len(self.plan.prompts)},
            "turns": [{**turn.figures, "forwards": _forwards(turn)} for turn in self.turns],
            "medians": self.medians,
            "errors": list(self.errors),
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


def make_turn(one: Pass, costs: Sequence[ForwardCost]) -> Turn:
    """Combines a pass with the forwards of ``ROWS``. Raises like ``token_ms``."""
    one_row, six_rows = costs
    num_tokens = sum(record.num_output_tokens for record in one.records)
    return Turn(
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
    plan: ServePlan,
    model: str,
    measure_forwards: Callable[[], Sequence[ForwardCost]],
    on_progress: Callable[[str, int, int], None],
) -> PlainResult:
    """Runs the plan's passes, one request at a time, each after a measurement of the target's forwards.

    Args:
        plan: the requests; its arms and concurrency are ignored.
        model: name of the model at the server.
        measure_forwards: measures forwards of ``ROWS`` in this process, while the server is idle.
        on_progress: called before each part with its name, and how many parts of how many are done.

    Raises:
        ConfigError: outputs are too short, or ``measure_forwards`` raised it.
        InvalidRequestError: the server refuses a warm-up request.
        EngineLostError: the server is away.
        SpecrayError: no request of a turn was answered.
    """
    turns: list[Turn] = []
    errors: list[str] = []
    num_all = plan.num_repeats * (1 + len(plan.prompts))
    for turn in range(plan.num_repeats):
        num_done = turn * (1 + len(plan.prompts))
        on_progress("forwards", num_done, num_all)
        # Measured first: a wrong context length or checkpoint shows here.
        costs = measure_forwards()

        def advance() -> None:
            nonlocal num_done
            num_done += 1
            on_progress("over HTTP", num_done, num_all)

        advance()
        one, failures = await _run_pass(plan, model, turn, advance)
        errors += failures
        turns.append(make_turn(one, costs))
    return PlainResult(plan, model, tuple(turns), tuple(errors))


def plain_table(result: PlainResult, *, title: str) -> Table:
    """Makes a table with one column per turn, and their medians."""
    table = Table(title=title, caption="bound: the linear layers alone at one row, in this process, in turns")
    table.add_column("")
    for turn in range(len(result.turns)):
        table.add_column(f"turn {turn + 1}", justify="right")
    table.add_column("median", justify="right")
    columns = [*(turn.figures for turn in result.turns), result.medians]
    for name, (heading, digits) in _HEADINGS.items():
        table.add_row(heading, *(f"{figures[name]:.{digits}f}" for figures in columns))
    return table


async def _run_pass(
    plan: ServePlan, model: str, turn: int, advance: Callable[[], None]
) -> tuple[Pass, Sequence[str]]:
    """Runs one pass on a new connection: servers close those that were idle during the forwards."""
    async with ServerClient(plan.url, timeout_s=plan.timeout_s, key=api_key()) as client:
        for prompt in plan.prompts[: plan.num_warmup]:
            await send(client, _body(plan, model, prompt, f"turn {turn + 1}, warm-up"))
        bodies = [_body(plan, model, prompt, f"turn {turn + 1}") for prompt in plan.prompts]
        one = await run_pass(client, bodies, concurrency=1, on_done=advance)
    if not one.measured.records:
        raise SpecrayError(f"no request of turn {turn + 1} was answered: {one.errors[0]}")
    return one.measured, one.errors


def _body(plan: ServePlan, model: str, prompt: str, label: str) -> dict[str, Any]:
    return {**request_body(plan, PLAIN, prompt, label), "model": model, "stream_options": STREAM_OPTIONS}


def _forwards(turn: Turn) -> list[Mapping[str, Any]]:
    return [asdict(cost) for cost in (turn.one_row, turn.six_rows)]


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
