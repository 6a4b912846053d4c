"""``specray bench serve`` and ``routing``: a running server, and conversations on several Routers."""

from __future__ import annotations

import asyncio

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
