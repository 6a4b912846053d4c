"""``specray bench``: a running server, or the parts of one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from specray.bench.prompts import Dataset
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.bench.serve import Plan, Result

DEFAULT_URL = "http://127.0.0.1:8000"


class _ServeByDefault(TyperGroup):
    """``specray bench [OPTIONS]`` is ``specray bench serve [OPTIONS]``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["serve", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    cls=_ServeByDefault,
    help="Measure a running server with speculation on and off (serve, the default), or the parts of one.",
)


@app.callback()
def _root() -> None:
    """Measure a running server with speculation on and off (serve, the default), or the parts of one."""


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="The server.")] = DEFAULT_URL,
    dataset: Annotated[Dataset, typer.Option(help="Where prompts come from.")] = Dataset.BUILTIN,
    dataset_path: Annotated[
        Path | None, typer.Option(help="The data set's file (JSON lines, .gz too).")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts per pass.")] = 12,
    num_repeats: Annotated[int, typer.Option(min=1, help="Passes per arm, in turns.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every request.")] = 0,
    num_warmup: Annotated[int, typer.Option(min=0, help="Requests per arm that are not counted.")] = 2,
    num_speculative_tokens: Annotated[
        list[int] | None, typer.Option(min=0, max=32, help="One more arm with this K; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Every output has max-tokens tokens.")] = True,
    timeout_s: Annotated[float, typer.Option(min=1, help="For one request.")] = 600.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results there.")] = None,
) -> None:
    """Measure a running server over HTTP, speculation off and on in turns."""
    from specray.bench.prompts import load_prompts
    from specray.bench.serve import Plan, default_arms

    plan = Plan(
        url=url,
        prompts=load_prompts(dataset, dataset_path, num_prompts),
        arms=default_arms(num_speculative_tokens or ()),
        num_repeats=num_repeats,
        concurrency=concurrency,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        num_warmup=num_warmup,
        timeout_s=timeout_s,
    )
    raise typer.Exit(_report(_run(plan), json_path))


def _run(plan: Plan) -> Result:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from specray.bench.serve import measure

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("warm-up", total=None)

        def show(name: str, num_done: int, num_all: int) -> None:
            progress.update(task, description=f"speculation {name}", completed=num_done, total=num_all)

        return asyncio.run(measure(plan, show))


def _report(result: Result, json_path: Path | None) -> int:
    from rich.console import Console

    from specray.bench.report import serve_table

    console = Console()
    console.print(serve_table(result))
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(result.as_json(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {json_path}: {error.strerror}") from None
    failures = [text for arm in result.arms for text in arm.errors]
    for failure in failures:
        Console(stderr=True).print(f"failed: {failure}", markup=False)
    return 1 if failures else 0
