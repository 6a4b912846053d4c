"""``specray serve``: a pair served over HTTP and gRPC, with Ray."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from specray.cli import options
from specray.cli.ending import PATIENCE_S, Guardian
from specray.cli.options import option


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options that set a key of the configuration each, see ``settings.pair_options``."""

    target: options.ServedTarget = None
    draft: options.Draft = None
    drafter: options.Drafter = None
    tensor_parallel_size: int | None = option(None, "Tensor-parallel ranks of the target.")
    dtype: options.Dtype = None
    weights: options.StoredBits = None
    device: options.Device = None
    max_model_len: options.MaxModelLen = None
    num_speculative_tokens: options.NumSpeculativeTokens = None
    verification: options.Verification = None
    overlap: options.OverlapMode = None
    tree: options.Tree = None
    num_draft_replicas: int | None = option(None, "Number of draft actors.")
    served_model_name: str | None = option(None, "Name of the model in the API.")
    host: str | None = option(None, "Address on which HTTP and gRPC listen.")
    port: int | None = option(None, "HTTP port; default: 8000.")
    grpc_port: int | None = option(None, "gRPC port; 0 turns gRPC off. Default: 9000.")


@options.flattened
def serve(
    context: typer.Context,
    given: ServeOptions,
    config: Annotated[
        Path | None,
        typer.Argument(help="Configuration file (YAML); options on the command line take precedence."),
    ] = None,
    settings: options.Settings = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="One of several models, each with a draft of its own. May be repeated."),
    ] = None,
) -> None:
    """Serve a pair over HTTP (OpenAI-compatible) and gRPC until Ctrl-C; by default a small chat model.

    Without --target, smollm2-135m-instruct is fetched once (93 MB); failing that, it is the embedded pair.
    """
    from specray.cli.settings import build_config, pair_options, several_models

    values = pair_options(**asdict(given))
    if models:
        values["models"] = several_models(models)
    merged = build_config(config, values, settings or [], chooses_target=True)

    from specray.serving.launch import end_time_s, run_service

    if isinstance(context.obj, Guardian):
        context.obj.patience_s = max(PATIENCE_S, end_time_s(merged))
    raise typer.Exit(run_service(merged))
