"""`specray models`: train, evaluate and inflate checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Train, evaluate and inflate checkpoints.")

EMBEDDED_TARGET = "embedded"


@app.callback()
def models() -> None:
    """Keeps the commands below named even while there is only one."""


@app.command()
def inflate(
    source: Annotated[str, typer.Argument(help="Llama checkpoint directory, or 'embedded' for the target.")],
    destination: Annotated[Path, typer.Argument(help="Directory to write; must not exist or be empty.")],
    hidden_size: Annotated[int, typer.Option(help="Width of the residual stream.")],
    num_layers: Annotated[int, typer.Option(help="Decoder layers.")],
    intermediate_size: Annotated[int, typer.Option(help="Width of the MLP.")],
    num_heads: Annotated[int, typer.Option(help="Query heads.")],
    num_kv_heads: Annotated[int, typer.Option(help="Key/value heads; divides --num-heads.")],
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; default: as SOURCE.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random weights in what is added.")] = 0,
) -> None:
    """Write a bigger checkpoint that computes the same function as SOURCE."""
    from specray.demo.inflate import InflatedShape, inflate_checkpoint
    from specray.demo.paths import demo_target_path

    shape = InflatedShape(
        hidden_size=hidden_size,
        num_layers=num_layers,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    directory = demo_target_path() if source == EMBEDDED_TARGET else Path(source)
    written = inflate_checkpoint(directory, destination, shape, dtype=dtype, seed=seed)
    typer.echo(f"wrote {written}")
