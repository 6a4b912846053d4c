"""``specray keys``: makes API keys for the HTTP and gRPC endpoints."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Make API keys for the HTTP and gRPC endpoints.")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name in the configuration.")] = "default",
) -> None:
    """Make a key: it is shown only once; the configuration gets its SHA-256."""
    from specray.config import parse_config
    from specray.serving.admission.api_keys import key_hash, new_key

    key = new_key()
    entry = {"name": name, "sha256": key_hash(key)}
    parse_config({"auth": {"keys": [entry]}})
    print(f"# For the caller, shown only now: {key}")
    print("# For the configuration, under auth.keys:")
    print(f'- {{name: "{name}", sha256: "{entry["sha256"]}"}}')


@app.callback()
def _root() -> None:
    """Makes ``new`` a subcommand; typer would make a single command the whole application."""
