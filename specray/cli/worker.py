"""``specray worker``: an engine as a plain process, without Ray."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from specray.cli.serve import Setting
from specray.rpc.parent import end_with_parent


class Role(StrEnum):
    DRAFT = "draft"
    TARGET = "target"


def worker(
    role: Annotated[Role, typer.Argument(help="Which engine.")],
    listen: Annotated[str, typer.Option(help="Where to listen: unix:/path or host:port (port 0: any).")],
    config: Annotated[Path | None, typer.Option(help="Configuration file (YAML).")] = None,
    model: Annotated[str | None, typer.Option(help="Path, hub id, or embedded.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of one sequence.")] = None,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads; default: by cores.")] = None,
    settings: Setting = None,
    parent_pid: Annotated[
        int | None, typer.Option(help="End when this process, which started this one, has ended.")
    ] = None,
) -> None:
    """Serve one engine over gRPC until Ctrl-C: a draft or a target of one rank."""
    from specray.cli.settings import build_config
    from specray.config import MODEL_FREE_DRAFTS
    from specray.environment import apply_thread_environment
    from specray.errors import ConfigError
    from specray.telemetry.logs import configure_logging

    apply_thread_environment()

    options = {
        "model": model,
        "dtype": dtype,
        "device": device,
        "max_model_len": max_model_len,
        "num_threads": num_threads,
    }
    own = {f"{role}.{key}": value for key, value in options.items()}
    # Of a pair this process knows one half only.
    other: dict[str, object] = {"draft.enabled": False} if role is Role.TARGET and config is None else {}
    merged = build_config(config, own | other, settings or [])
    if role is Role.DRAFT and merged.draft.model in MODEL_FREE_DRAFTS:
        raise ConfigError(
            f"draft.model is {merged.draft.model!r}, which drafts in the Router and has no worker; "
            "allowed: a model"
        )
    if parent_pid is not None:
        end_with_parent(parent_pid)
    configure_logging(merged.logging, context={"worker": role.value})

    from specray.engine.build import build_draft_engine, build_target_engine
    from specray.rpc.channel import channel_options
    from specray.rpc.worker import serve_engine

    start_timeout_s, rpc_options = merged.router.start_timeout_s, channel_options(merged.rpc)
    if role is Role.DRAFT:
        serve_engine(
            lambda: build_draft_engine(merged),
            role="draft",
            address=listen,
            start_timeout_s=start_timeout_s,
            options=rpc_options,
        )
    else:
        serve_engine(
            lambda: build_target_engine(merged),
            role="target",
            address=listen,
            start_timeout_s=start_timeout_s,
            options=rpc_options,
        )
