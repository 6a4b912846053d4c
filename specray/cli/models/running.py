"""``specray models running``, ``load`` and ``unload``: the models of a service that runs."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from specray.bench.core.options import DEFAULT_URL

Url = Annotated[str, typer.Option(help="Address of the service.")]
Model = Annotated[str, typer.Argument(help="Name in `specray models running`.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds until it is given up.")]


def running(url: Url = DEFAULT_URL) -> None:
    """List the models of a service, and which of them are loaded. SPECRAY_API_KEY is sent where it is set."""
    from rich.table import Table

    from specray.cli.output import wide_console

    table = Table(title=f"Models of {url}")
    for column in ("name", "state", "GiB", "load s", "from", "why not"):
        table.add_column(column, overflow="fold")
    for entry in asyncio.run(_ask(url, "GET", "/v1/models", None, 30.0))["data"]:
        # A service of one model tells no states: it is loaded.
        status = entry.get("status") or {"value": "loaded"}
        cells = [status.get(name) for name in ("value", "memory_gib", "load_s")]
        cells += [entry.get("root"), status.get("reason")]
        table.add_row(entry["id"], *("" if cell is None else str(cell) for cell in cells))
    wide_console().print(table)


def load(model: Model, url: Url = DEFAULT_URL, timeout_s: Timeout = 600.0) -> None:
    """Load a model of a service, which says before what it takes; returns when it is loaded."""
    for entry in asyncio.run(_ask(url, "GET", "/v1/models", None, 30.0))["data"]:
        if entry["id"] == model and (status := entry.get("status")) is not None:
            typer.echo(f"{model} is {status['value']}; it takes {status['memory_gib']:.2f} GiB")
    _change(url, "load", model, timeout_s)


def unload(model: Model, url: Url = DEFAULT_URL, timeout_s: Timeout = 600.0) -> None:
    """Unload a model of a service once its requests have ended; the next request loads it again."""
    _change(url, "unload", model, timeout_s)


def _change(url: str, change: str, model: str, timeout_s: float) -> None:
    body = {"model": model, "timeout_s": timeout_s}
    answer = asyncio.run(_ask(url, "POST", f"/v1/models/{change}", body, timeout_s + 30.0))
    took = "" if change == "unload" or not answer["load_s"] else f" in {answer['load_s']:.1f} s"
    typer.echo(f"{answer['model']} is {answer['value']}{took}")


async def _ask(url: str, method: str, path: str, body: object, timeout_s: float) -> Any:
    """Returns the decoded answer.

    Raises:
        EngineLostError: there is no service, or it refuses; with its reason.
    """
    import aiohttp

    from specray.environment import api_key
    from specray.errors import EngineLostError

    key = api_key()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(url, timeout=timeout, headers=headers) as http,
            http.request(method, path, json=body) as response,
        ):
            answer = await response.json(content_type=None)
            if response.status != 200:
                reason = answer.get("error", {}).get("message") or f"status {response.status}"
                raise EngineLostError(reason)
            return answer
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise EngineLostError(f"{url}: {error or 'no answer in time'}") from error
