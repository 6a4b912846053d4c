"""``specray worker``: an engine as a plain process, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specray.cli.serve import Setting
from specray.rpc.workers.parent import end_with_parent

if TYPE_CHECKING:
    from specray.config import Config
    from specray.engine.draft import DraftHead
    from specray.engine.runner.parallel import ParallelContext
    from specray.engine.target import TargetHead
    from specray.rpc.role import RoleName


class Role(StrEnum):
    DRAFT = "draft"
    TARGET = "target"


def worker(
    role: Annotated[Role, typer.Argument(help="Which engine.")],
    listen: Annotated[
        str | None, typer.Option(help="Where to listen: unix:/path or host:port (port 0: any).")
    ] = None,
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
    rank: Annotated[
        int, typer.Option(min=0, hidden=True, help="Of a group; 0 leads it and starts the others.")
    ] = 0,
    meeting: Annotated[
        str | None, typer.Option(hidden=True, help="Of the other ranks: host:port of the leader's store.")
    ] = None,
) -> None:
    """Serve one engine over gRPC until Ctrl-C, with all its ranks on this machine."""
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

    if rank > 0:
        from specray.serving.local.ranks import follow

        assert meeting is not None, "the leader says where it is"
        follow(merged, role.value, rank, meeting)
    elif listen is None:
        raise ConfigError("--listen is missing; allowed: unix:/path or host:port")
    else:
        _serve(merged, role.value, listen)


def _serve(config: Config, role: RoleName, address: str) -> None:
    """Until a signal comes, the engine is broken or a rank is lost."""
    engine = config.draft if role == "draft" else config.target
    if engine.tensor_parallel_size == 1:
        _serve_engine(config, role, address, lambda: None)
        return
    from specray.actors.workers import join_group
    from specray.serving.local.ranks import local_ranks, sharing_cores

    config = sharing_cores(config, role)
    with local_ranks(config, role) as store:
        _serve_engine(config, role, address, lambda: join_group(config, role, 0, store))


def _serve_engine(
    config: Config, role: RoleName, address: str, join: Callable[[], ParallelContext | None]
) -> None:
    """With the group that ``join`` meets, where the engine is loaded."""
    from specray.engine.build import build_draft_engine, build_target_engine
    from specray.rpc.channel import channel_options
    from specray.rpc.workers.worker import serve_engine

    def draft() -> DraftHead:
        return build_draft_engine(config, parallel=join())

    def target() -> TargetHead:
        return build_target_engine(config, parallel=join())

    serve_engine(
        draft if role == "draft" else target,
        role=role,
        address=address,
        start_timeout_s=config.router.start_timeout_s,
        options=channel_options(config.rpc),
    )
