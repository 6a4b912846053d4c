"""Options that the plans of several measurements share, as typer has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.load.prompts import Dataset

DEFAULT_URL = "http://127.0.0.1:8000"

PromptSource = Annotated[Dataset, typer.Option(help="Source of the prompts.")]
PromptPath = Annotated[Path | None, typer.Option(help="File of the data set: JSON lines, plain or gzip.")]
NumPrompts = Annotated[int, typer.Option(min=1, help="Number of different prompts.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Output tokens per prompt.")]
Temperature = Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy.")]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy. May be repeated."),
]
Seed = Annotated[int, typer.Option(help="Seed of all random draws.")]
RequestTimeout = Annotated[float, typer.Option(min=1, help="Seconds allowed for one request.")]
ServerUrl = Annotated[str, typer.Option(help="URL of the running server.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
NumTurns = Annotated[int, typer.Option(min=1, help="Passes per arm, in turns.")]
FreshPrompts = Annotated[
    bool, typer.Option(help="Send no prompt to a server, or an arm, twice: no prefix cache knows it.")
]
IsChat = Annotated[
    bool, typer.Option(help="Ask in the model's chat template, where it has one, or for a continuation.")
]


@dataclass(frozen=True, slots=True)
class PromptSourceOptions:
    """Where prompts come from."""

    dataset: PromptSource = Dataset.BUILTIN
    dataset_path: PromptPath = None
