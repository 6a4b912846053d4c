"""``specray bench serve``, ``routing``, ``scaling``, ``loading``: servers, Routers, several models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.plans import RoutingPlan, ServePlan
from specray.cli import options


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
