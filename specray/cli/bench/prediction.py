"""``specray bench prediction``: what predicted outputs bring, by how much they were edited."""

from __future__ import annotations

import asyncio

from specray.bench.plans import PredictionPlan
from specray.cli import options


@options.flattened
def prediction(
    plan: PredictionPlan,
    target: options.TargetModel = None,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    max_model_len: options.MaxModelLen = 1024,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
) -> None:
    """Measure the target's own outputs as predictions, as they are and edited, without Ray."""
    from rich.console import Console

    from specray.bench.prediction import measure_prediction
    from specray.cli.output import print_rows
    from specray.cli.settings import build_config, pair_options

    values = pair_options(target=target, draft=draft, dtype=dtype, max_model_len=max_model_len)
    config = build_config(None, values, settings or [])
    with Console(stderr=True).status("starting the pair") as status:
        rows = asyncio.run(measure_prediction(config, plan, status.update))
    print_rows("prediction", rows, json_path)
