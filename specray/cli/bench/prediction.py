"""``specray bench prediction``: what predicted outputs bring, by how much they were edited."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from specray.bench.load.prompts import Dataset
from specray.cli import options

NumRepeats = Annotated[
    int, typer.Option(min=1, help="Turns, in each of which every arm asks for all outputs.")
]


def prediction(
    target: options.TargetModel = None,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    dataset: options.PromptSource = Dataset.BUILTIN,
    dataset_path: options.PromptPath = None,
    num_prompts: Annotated[int, typer.Option(min=2, help="Number of different prompts.")] = 4,
    num_repeats: NumRepeats = 3,
    max_tokens: options.MaxTokens = 256,
    max_model_len: options.MaxModelLen = 1024,
    seed: options.Seed = 0,
    settings: options.Settings = None,
    json_path: options.JsonPath = None,
) -> None:
    """Measure the target's own outputs as predictions, as they are and edited, without Ray."""
    from rich.console import Console

    from specray.bench.load.prompts import load_prompts
    from specray.bench.prediction import measure_prediction
    from specray.cli.output import print_rows
    from specray.cli.settings import build_config, pair_options
    from specray.tokenization import load_tokenizer

    values = pair_options(target=target, draft=draft, dtype=dtype, max_model_len=max_model_len)
    config = build_config(None, values, settings or [])
    tokenizer = load_tokenizer(config.target.model)
    prompts = [tokenizer.encode(text) for text in load_prompts(dataset, dataset_path, num_prompts)]
    with Console(stderr=True).status("starting the pair") as status:
        rows = asyncio.run(
            measure_prediction(
                config,
                prompts,
                tokenizer,
                max_tokens=max_tokens,
                num_repeats=num_repeats,
                seed=seed,
                on_progress=status.update,
            )
        )
    print_rows("prediction", rows, json_path)
