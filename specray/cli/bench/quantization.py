"""``specray bench quantization``: what quantised weights do to a model's predictions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from specray.cli import options


def quantization(
    model: options.Model = "embedded",
    role: options.Role = options.EngineRole.TARGET,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    num_threads: options.NumThreads = None,
    formats: options.WeightFormats = None,
    text: Annotated[Path | None, typer.Option(help="Text to predict; default: Python's reference.")] = None,
    num_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text, from its beginning.")] = 8192,
    window_len: Annotated[int, typer.Option(min=2, help="Tokens that are read at once.")] = 256,
    json_path: options.JsonPath = None,
) -> None:
    """Measure the loss of a text with weights in several formats, and the agreement with the first."""
    from rich.console import Console

    from specray.environment import apply_thread_environment

    apply_thread_environment()
    from specray.bench.quantization import build_runners, measure_quality, quality_table, read_text
    from specray.cli.bench.engines import engine_of
    from specray.cli.output import wide_console, write_json
    from specray.engine.model.description import model_path
    from specray.tokenization import load_tokenizer

    engine = engine_of(role, model=model, dtype=dtype, device=device, num_threads=num_threads)
    chosen = formats or ["none", "int8", "int4", "int8:int8", "int4:int8", "int4:int4"]
    console = Console(stderr=True)
    with console.status("loading") as status:
        tokenizer = load_tokenizer(model_path(engine, role.value))
        # A token has less than 16 characters, but for runs of blanks and the like.
        token_ids = tokenizer.encode(read_text(text)[: 16 * num_tokens])[:num_tokens]
        runners = build_runners(engine, chosen, role.value)
        qualities = measure_quality(
            runners,
            token_ids,
            window_len=window_len,
            progress=lambda done, total: status.update(f"{done} of {total} tokens"),
        )
    wide_console().print(quality_table(qualities, title=f"{role} {model}, {dtype}"))
    write_json([asdict(quality) for quality in qualities], json_path)
