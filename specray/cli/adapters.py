"""``specray adapters``: lists, loads and unloads the adapters of a service that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from specray.bench.load.client import ServerClient

app = typer.Typer(no_args_is_help=True, help="List, load and unload LoRA adapters of a service that runs.")

Url = Annotated[str, typer.Option(help="URL of the service; SPECRAY_API_KEY is sent as its key.")]
OWN_URL = "http://127.0.0.1:8000"
T = TypeVar("T")
Name = Annotated[str, typer.Argument(help="Name that requests give as their model.")]
Model = Annotated[
    str | None, typer.Option(help="Which of several models it changes; default: the default one.")
]


@app.command("list")
def list_adapters(url: Url = OWN_URL) -> None:
    """Show the adapters that have a name, with their folders and digests."""
    for model in _call(url, lambda client: client.listed()):
        # An alias has a parent, too.
        if model.get("adapter") is not None:
            typer.echo(f"{model['id']}\t{model['root']}\t{model['adapter']}")


@app.command()
def load(
    name: Name,
    folder: Annotated[
        str | None,
        typer.Argument(help="Folder in target.adapters.directory; default: the one of that name."),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="The name may stand for other bytes already.")
    ] = False,
    model: Model = None,
    url: Url = OWN_URL,
) -> None:
    """Load an adapter under a name; requests that run keep what the name stood for."""
    body = {
        "lora_name": name,
        "lora_path": name if folder is None else folder,
        "load_inplace": replace,
        "model": model,
    }
    answer = _call(url, lambda client: client.post("/v1/load_lora_adapter", body))
    typer.echo(f"{answer['lora_name']}\t{answer['lora_path']}\t{answer['digest']}")


@app.command()
def unload(name: Name, model: Model = None, url: Url = OWN_URL) -> None:
    """Take an adapter's name away; it leaves memory once no request uses it."""
    body = {"lora_name": name, "model": model}
    answer = _call(url, lambda client: client.post("/v1/unload_lora_adapter", body))
    typer.echo(f"{answer['lora_name']} is unloaded")


def _call(url: str, ask: Callable[[ServerClient], Awaitable[T]]) -> T:
    from specray.bench.load.client import ServerClient
    from specray.environment import api_key

    async def call() -> T:
        async with ServerClient(url, timeout_s=120.0, key=api_key()) as client:
            return await ask(client)

    return asyncio.run(call())
