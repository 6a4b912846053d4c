"""``specray serve``: a pair served over HTTP and gRPC, with Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specray.cli import options
from specray.cli.ending import PATIENCE_S, Guardian

ConfigPath = Annotated[
    Path | None,
    typer.Argument(help="Configuration file (YAML); options on the command line take precedence."),
]


def serve(
    context: typer.Context,
    config: ConfigPath = None,
    target: options.ServedTarget = None,
    draft: options.Draft = None,
    drafter: options.Drafter = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    verification: options.Verification = None,
    overlap: options.OverlapMode = None,
    tree: options.Tree = None,
    num_draft_replicas: options.NumDraftReplicas = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model in the API.")] = None,
    host: Annotated[str | None, typer.Option(help="Address on which HTTP and gRPC listen.")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; default: 8000.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port; 0 turns gRPC off. Default: 9000.")] = None,
    settings: options.Settings = None,
) -> None:
    """Serve a pair over HTTP (OpenAI-compatible) and gRPC until Ctrl-C; by default a small chat model.

    Without --target, smollm2-135m-instruct is fetched once (93 MB); failing that, it is the embedded pair.
    """
    from specray.cli.settings import build_config, pair_options

    values = pair_options(
        target=target,
        draft=draft,
        drafter=drafter,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        verification=verification,
        overlap=overlap,
        tree=tree,
    ) | {
        "target.tensor_parallel_size": tensor_parallel_size,
        "draft.num_replicas": num_draft_replicas,
        "served_model_name": served_model_name,
        "http.host": host,
        "http.port": port,
        "grpc.host": host,
        "grpc.port": grpc_port,
    }
    merged = build_config(config, values, settings or [], chooses_target=True)

    from specray.serving.launch import end_time_s, run_service

    if isinstance(context.obj, Guardian):
        context.obj.patience_s = max(PATIENCE_S, end_time_s(merged))
    raise typer.Exit(run_service(merged))
