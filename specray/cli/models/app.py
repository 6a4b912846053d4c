"""``specray models``: fetches, converts, lists and removes models; evaluates pairs; inflates and trims."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from specray.cli import options
from specray.cli.models import running

EMBEDDED = "embedded"
"""Name of the embedded model, repeated here since ``specray.config`` is slow to import."""

app = typer.Typer(
    no_args_is_help=True,
    help="Fetch, convert, list and remove models; load and unload those of a service; evaluate pairs; "
    "inflate checkpoints; trim vocabularies.",
)
app.command()(running.running)
app.command()(running.load)
app.command()(running.unload)


@app.command()
def fetch(
    models: Annotated[
        list[str], typer.Argument(help="Known names, GGUF files, directories with one, or hub ids.")
    ],
) -> None:
    """Fetch models, convert them where need be, and print the paths that --target and --draft take."""
    from specray.cli.models.checkpoints import fetch_sources, fetched_checkpoint
    from specray.errors import ConfigError
    from specray.models.catalogue import known_names
    from specray.models.hub import HUB_ID, fetch_from_hub
    from specray.models.resolve import find_source

    sources = [find_source(model) for model in models]
    for model, source in zip(models, sources, strict=True):
        if source is None and (Path(model).exists() or not HUB_ID.fullmatch(model)):
            raise ConfigError(
                f"model {model!r} is nothing to fetch; allowed: {known_names()}, a GGUF file, "
                "or a hub id such as 'owner/name'"
            )
    fetch_sources(sources)
    for model, source in zip(models, sources, strict=True):
        typer.echo(fetch_from_hub(model) if source is None else fetched_checkpoint(source).directory)


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="Known name, GGUF file, or directory with one.")],
    directory: Annotated[Path, typer.Argument(help="Directory for the checkpoint; empty or new.")],
) -> None:
    """Write a GGUF file's numbers as a bfloat16 checkpoint in safetensors, for training and other tools."""
    from specray.cli.models.checkpoints import write_plain
    from specray.errors import ConfigError
    from specray.models.catalogue import known_names
    from specray.models.resolve import find_source

    source = find_source(model)
    if source is None:
        raise ConfigError(f"model {model!r} is nothing to convert; allowed: {known_names()}, or a GGUF file")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"directory {str(directory)!r} is there already; allowed: an empty or new one")
    write_plain(source, directory)
    typer.echo(directory)


@app.command("list")
def show_models(
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Name the tokens at which outputs of kept models end.")
    ] = False,
) -> None:
    """List the models that can be fetched by name, and those that are kept."""
    from rich.table import Table

    from specray.cli.output import wide_console
    from specray.models.cache import user_cache
    from specray.models.listing import list_models

    cache = user_cache()
    table = Table(title=f"Models in {cache.root}")
    for column in ("name", "download", "on disk", "licence", "from"):
        table.add_column(column, overflow="fold", no_wrap=column in ("name", "download", "on disk"))
    for row in list_models(cache):
        table.add_row(row.name, row.download, row.kept_size, row.licence, row.origin)
    wide_console().print(table)
    if verbose:
        from specray.errors import ConfigError
        from specray.tokenization import load_tokenizer

        for kept in cache.checkpoints():
            try:
                typer.echo(f"{kept.name} ends at {load_tokenizer(kept.directory).named_ends()}")
            except ConfigError as error:
                typer.echo(str(error))


@app.command()
def remove(model: Annotated[str, typer.Argument(help="Name in `specray models list`.")]) -> None:
    """Remove a kept model from the cache; what is being served goes on."""
    from specray.cli.models.fetching import fetch_listener
    from specray.models.cache import user_cache
    from specray.models.listing import remove_model
    from specray.models.space import format_size

    with fetch_listener() as listener:
        typer.echo(f"removed {model}: {format_size(remove_model(model, user_cache(), listener))}")


@app.command()
def evaluate(
    target: Annotated[str, typer.Option(help="Checkpoint directory, or embedded.")] = EMBEDDED,
    draft: Annotated[str, typer.Option(help="Checkpoint directory, or embedded; same tokenizer.")] = EMBEDDED,
    json_path: options.JsonPath = None,
    num_workers: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
) -> None:
    """Measure a pair on held-out files: its losses, and how often draft and target agree."""
    from specray.cli.output import write_json
    from specray.demo.paths import demo_draft_path, demo_target_path
    from specray.train.evaluate import EvaluateConfig, evaluate_pair

    evaluation = evaluate_pair(
        str(demo_target_path()) if target == EMBEDDED else target,
        str(demo_draft_path()) if draft == EMBEDDED else draft,
        config=EvaluateConfig(num_workers=num_workers),
        on_stage=lambda stage: typer.echo(f"{stage} ...", err=True),
    )
    text = evaluation.held_out_text
    typer.echo(f"held-out text ({text.num_files} files, {text.num_tokens} tokens)")
    typer.echo(f"  target  {text.target_loss:.3f} nats/token  {text.target_bits_per_byte:.3f} bits/byte")
    typer.echo(f"  draft   {text.draft_loss:.3f} nats/token  {text.draft_bits_per_byte:.3f} bits/byte")
    typer.echo(f"  greedy agreement {text.agreement:.3f}")
    for name, scores in (
        ("greedy continuations", evaluation.greedy_samples),
        ("continuations at temperature 1", evaluation.temperature_1_samples),
    ):
        typer.echo(f"target's {name} ({scores.num_positions} positions)")
        typer.echo(f"  greedy agreement {scores.agreement:.3f}  overlap {scores.overlap:.3f}")
    write_json(asdict(evaluation), json_path)


@app.command()
def inflate(
    source: Annotated[
        str,
        typer.Argument(help="Checkpoint directory of a Llama model, or embedded (its target)."),
    ],
    destination: Annotated[Path, typer.Argument(help="Directory for the new checkpoint; empty or new.")],
    hidden_size: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    num_layers: Annotated[int | None, typer.Option(help="Decoder layers.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Width of the MLP.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; divides --num-heads.")] = None,
    experts: Annotated[
        int | None, typer.Option(help="Routed experts of each layer; default: none, the model stays dense.")
    ] = None,
    chosen: Annotated[int, typer.Option(help="Experts that compute a token.")] = 8,
    share: Annotated[
        float, typer.Option(help="Share of the experts in what a step of one row reads; sets their width.")
    ] = 0.55,
    neighbours: Annotated[
        float, typer.Option(help="How alike neighbouring tokens choose: 0 (as they come) to 1.")
    ] = 0.0,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text that routers are made from; default: Python of this package."),
    ] = None,
    recurrent: Annotated[
        int | None,
        typer.Option(help="Recurrent layers (Mamba 2) before each layer; default: none."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32; default: as SOURCE."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights that are added.")] = 0,
) -> None:
    """Write a bigger checkpoint that computes the same function as SOURCE; sizes default to its own."""
    from specray.demo.paths import demo_target_path
    from specray.train.hybrid import HybridShape
    from specray.train.inflate import InflatedShape, inflate_checkpoint
    from specray.train.mixture import MixtureShape

    directory = demo_target_path() if source == EMBEDDED else Path(source)
    mixture = None if experts is None else MixtureShape(experts, chosen, share, neighbours)
    hybrid = None if recurrent is None else HybridShape(recurrent)
    shape = InflatedShape.of(
        directory,
        hidden_size=hidden_size,
        num_layers=num_layers,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    figures = inflate_checkpoint(
        directory,
        destination,
        shape,
        dtype=dtype,
        seed=seed,
        mixture=mixture,
        hybrid=hybrid,
        text_files=text or (),
    )
    typer.echo(f"wrote {destination}")
    if figures is not None:
        hit = ", ".join(f"{rows} rows {multiple:.2f}" for rows, multiple in figures.hit)
        typer.echo(
            f"experts are {figures.intermediate_size} wide and {figures.share:.2f} of what a row reads; "
            f"neighbours hit, in multiples of one row's experts: {hit}"
        )


@app.command()
def vocabulary(
    text_files: Annotated[list[Path], typer.Argument(help="Text like what the target will write, in UTF-8.")],
    output: Annotated[Path, typer.Option(help="File for the token ids (JSON): draft.vocabulary_ids.")],
    model: options.Model = EMBEDDED,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the text's tokens that the ids must be.")
    ] = 0.98,
) -> None:
    """Write the token ids that a draft's head should keep: the most frequent ones, and special tokens."""
    from specray.config import DraftConfig
    from specray.engine.model.description import ModelArgs, check_loadable, model_path
    from specray.tokenization import load_tokenizer
    from specray.tokenization.counts import frequent_ids

    path = model_path(DraftConfig(model=model), "draft")
    vocab_size = check_loadable(ModelArgs(path))
    found = frequent_ids(text_files, load_tokenizer(path), share=share, vocab_size=vocab_size)
    output.write_text(json.dumps(found.token_ids) + "\n", encoding="utf-8")
    typer.echo(
        f"wrote {output}: {len(found.token_ids)} of {vocab_size} token ids, {found.share:.2%} of "
        f"{found.num_tokens} tokens"
    )
