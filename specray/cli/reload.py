"""``specray reload``: changes a service while it serves."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specray.cli import options

if TYPE_CHECKING:
    from specray.config import Config

CONNECT_S = 60.0
"""Seconds for joining the service's Ray; a busy machine takes 20."""

ConfigPath = Annotated[
    Path | None,
    typer.Argument(help="Configuration file (YAML); without one, what is served with the changes of --set."),
]


def reload(
    config: ConfigPath = None,
    settings: options.Settings = None,
    port: Annotated[
        int | None, typer.Option(help="HTTP port of the service, if several run on this machine.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for all replicas to confirm.")] = 60.0,
) -> None:
    """Change speculation, limits, keys or logs of a service that `specray serve` runs, while it serves."""
    from specray.cli.settings import build_config, changed_config
    from specray.config import parse_config

    given = None if config is None else build_config(config, {}, settings or [], chooses_target=True)

    def wanted(served: dict[str, Any]) -> Config:
        if given is None:
            return changed_config(served, settings or [])
        update: dict[str, Any] = {}
        if given.http.server == "auto":
            # The service has chosen.
            update["http"] = given.http.model_copy(update={"server": served["http"]["server"]})
        keys = parse_config({"auth": {"keys": served["auth"]["keys"]}}).auth.keys
        if keys and "keys" not in given.auth.model_fields_set:
            # What is not said does not open a service.
            names = ", ".join(key.name for key in keys)
            print(
                f"auth.keys: {names} stay in force: {config} does not name it; `auth: {{keys: []}}` ends them"
            )
            update["auth"] = given.auth.model_copy(update={"keys": keys})
        return given.model_copy(update=update)

    if given is not None and port is None:
        port = given.http.port

    from specray.serving.own_ray.watch import within
    from specray.serving.reload import reload_service

    with within(timeout + CONNECT_S, "the Ray of the service has not answered", _give_up):
        found = reload_service(wanted, port=port, timeout_s=timeout)
    for change in found:
        print(change)
        if change.key == "auth.keys" and not change.new:
            print("auth.keys: the service is open now: whoever reaches it may call")
    if not found:
        print("specray: nothing differs from what is served")


def _give_up(reason: str) -> None:
    """Ends this process at once: calls of Ray wait for a lost part of it without end."""
    print(f"specray: {reason}; what has changed is not known", file=sys.stderr, flush=True)
    os._exit(1)
