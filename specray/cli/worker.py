"""``specray worker``: one engine as a gRPC server in a plain process, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from specray.cli import options
from specray.rpc.workers.parent import end_with_parent

if TYPE_CHECKING:
    from specray.config import Config
    from specray.engine.drafting.engine import DraftEngine
    from specray.engine.features.remote.engine import FeatureDraftEngine
    from specray.engine.group.parallel import ParallelContext
    from specray.engine.target.engine import TargetEngine
    from specray.rpc.role import RoleName


Listen = Annotated[
    str | None, typer.Option(help="Address to listen on: unix:/path or host:port; port 0 takes any free one.")
]
ParentPid = Annotated[
    int | None, typer.Option(help="Process id of the parent; the worker ends when that process has ended.")
]
Rank = Annotated[
    int, typer.Option(min=0, hidden=True, help="Tensor-parallel rank; rank 0 starts the others.")
]
Meeting = Annotated[
    str | None, typer.Option(hidden=True, help="Address of rank 0's store (host:port), for the other ranks.")
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Keys of the engine's section of the configuration."""

    model: str | None = options.option(None, "Model: path, hub id, or embedded.")
    dtype: options.Dtype = None
    weights: options.StoredBits = None
    device: options.Device = None
    max_model_len: options.MaxModelLen = None
    num_threads: options.NumThreads = None


@options.flattened
def worker(
    role: Annotated[options.EngineRole, typer.Argument(help="Engine to serve.")],
    engine: EngineOptions,
    listen: Listen = None,
    config: options.ConfigPath = None,
    settings: options.Settings = None,
    parent_pid: ParentPid = None,
    rank: Rank = 0,
    meeting: Meeting = None,
) -> None:
    """Serve one engine over gRPC until Ctrl-C, with all its ranks on this machine."""
    from specray.cli.settings import build_config
    from specray.config import MODEL_FREE_DRAFTS
    from specray.environment import apply_thread_environment
    from specray.errors import ConfigError
    from specray.telemetry.logs import configure_logging

    apply_thread_environment()

    own = {f"{role}.{key}": value for key, value in asdict(engine).items()}
    # Without a configuration, this process knows one engine of the pair only.
    other: dict[str, object] = (
        {"draft.enabled": False} if role is options.EngineRole.TARGET and config is None else {}
    )
    merged = build_config(config, own | other, settings or [])
    if role is options.EngineRole.DRAFT and merged.draft.model in MODEL_FREE_DRAFTS:
        raise ConfigError(
            f"draft.model is {merged.draft.model!r}, which drafts in the Router and has no worker; "
            "allowed: a model"
        )
    if parent_pid is not None:
        end_with_parent(parent_pid)
    configure_logging(merged.logging, context={"worker": role.value})

    if rank > 0:
        from specray.serving.local.ranks import follow

        assert meeting is not None, "rank 0 passes its address on"
        follow(merged, role.value, rank, meeting)
    elif listen is None:
        raise ConfigError("--listen is missing; allowed: unix:/path or host:port")
    else:
        _serve(merged, role.value, listen)


def _serve(config: Config, role: RoleName, address: str) -> None:
    """Serves the engine, and its ranks, until a signal comes, the engine breaks or a rank is lost."""
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
    """Serves the engine of this process; ``join`` makes its tensor-parallel group before it is loaded."""
    from specray.engine.build import build_draft_engine, build_target_engine
    from specray.rpc.channel import channel_options
    from specray.rpc.workers.worker import serve_engine

    def draft() -> DraftEngine | FeatureDraftEngine:
        return build_draft_engine(config, parallel=join())

    def target() -> TargetEngine:
        return build_target_engine(config, parallel=join())

    serve_engine(
        draft if role == "draft" else target,
        role=role,
        address=address,
        start_timeout_s=config.router.start_timeout_s,
        options=channel_options(config.rpc),
    )
