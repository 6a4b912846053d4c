"""``specray serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Setting = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of the configuration: dotted.key=value.")
]


def serve(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file (YAML); options come over it.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Target model: path or hub id.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft model: path or hub id; or ngram, suffix, none.")
    ] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(help="Ranks of the target.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32, of both models.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of one sequence.")] = None,
    num_speculative_tokens: Annotated[
        str | None, typer.Option(help="Most draft tokens per round: 0..32 or auto.")
    ] = None,
    verification: Annotated[str | None, typer.Option(help="coupled or rejection.")] = None,
    overlap: Annotated[str | None, typer.Option(help="auto, serial, ahead or enumerate.")] = None,
    num_draft_replicas: Annotated[int | None, typer.Option(help="Draft actors.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name in the API.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on, HTTP and gRPC.")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port (8000).")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port (9000); 0: no gRPC.")] = None,
    settings: Setting = None,
) -> None:
    """Serve a pair over HTTP (OpenAI-compatible) and gRPC until Ctrl-C; by default the embedded pair."""
    from specray.cli.settings import build_config, pair_options

    options = pair_options(
        target=target,
        draft=draft,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        verification=verification,
        overlap=overlap,
    ) | {
        "target.tensor_parallel_size": tensor_parallel_size,
        "draft.num_replicas": num_draft_replicas,
        "served_model_name": served_model_name,
        "http.host": host,
        "http.port": port,
        "grpc.host": host,
        "grpc.port": grpc_port,
    }
    merged = build_config(config, options, settings or [])

    from specray.serving.launch import run_service

    raise typer.Exit(run_service(merged))
