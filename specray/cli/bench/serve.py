"""``specray bench`` of servers: serve, plain, overload, structured, loading, scaling, routing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.plans import OverloadPlan, PlainPlan, RoutingPlan, ServePlan, StructuredPlan
from specray.cli import options

ServedTarget = Annotated[
    str, typer.Option(help="Checkpoint of the server's target: path, hub id, or embedded.")
]
ServedDtype = Annotated[str, typer.Option(help="Number format of the server's target: bfloat16 or float32.")]
ServedThreads = Annotated[
    int | None, typer.Option(help="CPU threads of the server's target; default: by cores and model size.")
]
Output = Annotated[Path | None, typer.Option("--output", "--json", help="File for the results (JSON).")]
StructuredReport = Annotated[
    Path | None, typer.Option("--report", help="File for the report (Markdown); default: stdout.")
]


@options.flattened
def serve(plan: ServePlan, json_path: options.JsonPath = None) -> None:
    """Measure a running server over HTTP, with speculation off and on in turns."""
    from rich.console import Console

    from specray.bench.load.prompts import load_labelled_prompts
    from specray.bench.load.serve import default_arms, measure
    from specray.bench.load.serve_report import category_table, serve_json, serve_table
    from specray.cli.output import counted_progress, report_failures, write_json

    prompts = load_labelled_prompts(plan.dataset, plan.dataset_path, plan.num_prompts)
    arms = default_arms(plan.num_speculative_tokens or ())
    with counted_progress("warm-up") as show:
        result = asyncio.run(measure(plan, prompts, arms, show))
    Console().print(serve_table(result))
    if result.arms[0].categories:
        Console().print(category_table(result))
    write_json(serve_json(result), json_path)
    raise typer.Exit(report_failures([text for arm in result.arms for text in arm.errors]))


@options.flattened
def plain(
    plan: PlainPlan,
    target: ServedTarget = "embedded",
    dtype: ServedDtype = "bfloat16",
    num_threads: ServedThreads = None,
    json_path: options.JsonPath = None,
) -> None:
    """Measure plain decoding of a running server against the least it can cost: reading its weights once.

    Sends one request at a time with speculation off, in turns with forwards of the same target in this
    process: its linear layers alone, and whole forwards of one and six rows. Run it on the server's machine,
    with nothing else on it.
    """
    from functools import partial

    from rich.console import Console

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.forwards import measure_forwards
    from specray.bench.load.prompts import load_prompts
    from specray.bench.plain import ROWS, measure_plain, plain_json, plain_table, served_model
    from specray.cli.output import counted_progress, report_failures, write_json
    from specray.cli.settings import NO_DRAFT, build_config, pair_options
    from specray.engine.runner.assembly import build_runner

    values = pair_options(target=target, draft=NO_DRAFT, dtype=dtype, num_threads=num_threads)
    # One sequence only: the server holds the memory.
    config = build_config(None, {**values, "target.max_num_seqs": 1})
    prompts = load_prompts(plan.dataset, plan.dataset_path, plan.num_prompts)
    # Asked before the checkpoint is loaded, which may take a minute.
    model = asyncio.run(served_model(plan.url))
    runner = build_runner(config.target, role="target")
    forwards = partial(
        measure_forwards, runner, rows=ROWS, context_len=plan.context_len, num_repeats=plan.num_repeats
    )
    with counted_progress("forwards") as show:
        result = asyncio.run(measure_plain(plan, prompts, model, forwards, show))
    Console().print(plain_table(result, title=f"{model} over HTTP, {target} in {dtype} here"))
    engine = {"target": target, "dtype": dtype, "num_threads": num_threads}
    write_json({**engine, **plain_json(result)}, json_path)
    raise typer.Exit(report_failures(result.errors))


@options.flattened
def overload(plan: OverloadPlan, output: Output = None) -> None:
    """Measure a running server at ten times its capacity: who is served, and who is refused.

    The capacity is measured first, in a closed loop; then requests arrive at a multiple of that rate,
    whatever the server answers. Run it on another machine than the server's, if you can: the load takes
    cores of its own.
    """
    from rich.console import Console
    from rich.progress import Progress

    from specray.bench.load.overload import measure_overload
    from specray.bench.load.overload_report import overload_json, overload_tables
    from specray.bench.load.prompts import load_prompts
    from specray.cli.output import write_json

    prompts = load_prompts(plan.dataset, plan.dataset_path, plan.num_prompts)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("capacity", total=1.0)
        result = asyncio.run(
            measure_overload(
                plan,
                prompts,
                lambda name, share: progress.update(task, description=name, completed=share),
            )
        )
    for table in overload_tables(result):
        Console().print(table)
    write_json(overload_json(result), output)


@options.flattened
def structured(plan: StructuredPlan, report: StructuredReport = None) -> None:
    """Ask a running chat model for JSON by many schemas: is it valid, equal under speculation, and how fast?

    With --hostile, grammars that ask for endless work are sent next to ordinary requests: how long does an
    answer take, and what do the others notice?
    """
    from specray.bench.core.provenance import provenance
    from specray.bench.load.prompts import Dataset, load_prompts
    from specray.bench.structured.hostile import attacks, measure_hostile
    from specray.bench.structured.judgement import shortfalls
    from specray.bench.structured.report import structured_report
    from specray.bench.structured.run import SPECULATIVE, measure_structured
    from specray.bench.structured.schemas import compose
    from specray.cli.output import counted_progress, report_failures, write_text
    from specray.errors import ConfigError

    names = [each.name for each in attacks()]
    for option, given, allowed in (("arm", plan.arm, SPECULATIVE), ("attack", plan.attack, names)):
        for name in given or ():
            if name not in allowed:
                raise ConfigError(f"--{option} is {name!r}; allowed: {', '.join(allowed)}")
    conditions = list(provenance())  # The sources may be changed while it runs.
    result = attacked = None
    if plan.num_schemas:
        with counted_progress("schemas") as show:
            result = asyncio.run(measure_structured(plan, compose(plan.num_schemas, plan.seed), show))
    if plan.hostile:
        with counted_progress("an ordinary schema") as show:
            attacked = asyncio.run(measure_hostile(plan, load_prompts(Dataset.BUILTIN, None, 12), show))
    text = structured_report(conditions, result, attacked)
    if report is None:
        typer.echo(text)
    else:
        write_text(report, text, "--report")
    found = [*(shortfalls(result) if result else ()), *(attacked.shortfalls if attacked else ())]
    raise typer.Exit(report_failures(found))


def loading(
    target: options.TargetModel = None,
    draft: options.Draft = None,
    num_loads: Annotated[int, typer.Option(min=3, help="Loads and unloads.")] = 10,
    page_path: Annotated[Path | None, typer.Option("--page", help="Page of Markdown to write.")] = None,
) -> None:
    """Measure what loading and unloading one of several models costs it and its neighbours, here."""
    from specray.bench.core.report import page
    from specray.bench.loading import loading_table, measure_loading
    from specray.cli.output import wide_console
    from specray.cli.settings import build_config, pair_options

    config = build_config(None, pair_options(target=target, draft=draft))
    pair = {name: getattr(config, name).model_dump(mode="json") for name in ("target", "draft")}
    table = loading_table(measure_loading(pair, num_loads=num_loads))
    wide_console().print(table)
    if page_path is not None:
        note = "Of one pair: two models stay loaded, one comes and goes, five are never loaded."
        text = page("Loading models", "specray bench loading", [note], [table])
        page_path.write_text(text, encoding="utf-8")


def scaling(
    target: options.TargetModel = None,
    draft: options.Draft = None,
    settings: options.Settings = None,
    max_routers: Annotated[int, typer.Option(min=2, max=16, help="Most Routers.")] = 4,
    num_clients: Annotated[int, typer.Option(min=2, help="Requests at a time under load.")] = 24,
    seconds: Annotated[float, typer.Option(min=5, help="Seconds of each phase.")] = 60.0,
    page_path: Annotated[Path | None, typer.Option("--page", help="Page of Markdown to write.")] = None,
) -> None:
    """Measure what requests notice while Routers of a service of its own come and go with the load."""
    from specray.bench.compare.peers.process import free_port
    from specray.bench.core.report import page
    from specray.bench.scaling import Phase, measure_scaling, scaled, scaling_table
    from specray.cli.output import wide_console
    from specray.cli.settings import build_config, pair_options
    from specray.serving.launch import running_service

    ports = [f"http.port={free_port()}", "grpc.port=0"]
    config = build_config(None, pair_options(target=target, draft=draft), [*ports, *(settings or [])])
    phases = [
        Phase("one client", 1, seconds / 2),
        Phase("load, Routers come", num_clients, seconds),
        Phase("load, all are there", num_clients, seconds),
        Phase("one client, Routers go", 1, seconds),
    ]
    with running_service(scaled(config, max_routers=max_routers)):
        courses = asyncio.run(measure_scaling(f"http://127.0.0.1:{config.http.port}", phases))
    table = scaling_table(courses)
    wide_console().print(table)
    if page_path is not None:
        note = "Closed loop; greedy outputs, each compared with that of the quiet service."
        text = page("Routers that follow the load", "specray bench scaling", [note], [table])
        page_path.write_text(text, encoding="utf-8")


@options.flattened
def routing(plan: RoutingPlan, json_path: options.JsonPath = None) -> None:
    """Compare routing by prefix and by load: real Routers with the embedded target, in turns.

    Says which share of what one cache for all would have found was found, and the time to first token.
    """
    from rich.console import Console

    from specray.bench.routing.report import measure_routing, routing_json, routing_table
    from specray.cli.output import write_json

    with Console(stderr=True).status("starting") as status:
        results = measure_routing(plan, status.update)
    Console().print(routing_table(results))
    write_json(routing_json(results), json_path)
