"""Measures what loading several models costs: the first answer of a cold one, memory, and its neighbours."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from specray.bench.compare.peers.process import free_port
from specray.bench.core.report import grid_of
from specray.bench.soak.memory import anonymous_bytes
from specray.bench.testbed.tree import descendants
from specray.config import Config, parse_config
from specray.errors import EngineLostError

if TYPE_CHECKING:
    from rich.table import Table

SETTLE_S: Final = 3.0
"""Seconds between a change and the look at memory."""
PROMPT: Final = "def fibonacci(n):\n"
TIMEOUT_S: Final = 300.0
_SUBJECT: Final = "m2"
"""The model that is loaded and unloaded; m0 and m1 stay, the others are never loaded."""


@dataclass(slots=True)
class LoadingFigures:
    """Seconds and MiB of anonymous memory of all processes."""

    alone_s: float = 0.0
    """Seconds from the start of a service of the model alone to its first answer."""
    first_answer_s: list[float] = field(default_factory=list)
    """Seconds to the first answer of the model when it is cold, by load."""
    unload_s: list[float] = field(default_factory=list)
    two_mib: float = 0.0
    """Memory of a service of two models."""
    eight_mib: float = 0.0
    """Memory of a service of eight, of which the same two are loaded."""
    unloaded_mib: list[float] = field(default_factory=list)
    """Memory after each unload."""
    num_processes: list[int] = field(default_factory=list)
    """Processes after each unload."""
    quiet_tokens_per_s: list[float] = field(default_factory=list)
    """Tokens per second of a neighbour, beside nothing."""
    loading_tokens_per_s: list[float] = field(default_factory=list)
    """The same, while the model is loaded."""


def measure_loading(pair: Mapping[str, Any], *, num_loads: int) -> LoadingFigures:
    """Starts services of one, two and eight models of one pair, and loads one of them again and again.

    Args:
        pair: ``target`` and ``draft`` of every model.

    Raises:
        EngineLostError: a request failed.
    """
    figures = LoadingFigures()
    began_s = time.monotonic()
    with _service([{"name": _SUBJECT, **pair}]) as url:
        asyncio.run(_answer(url, _SUBJECT))
        figures.alone_s = time.monotonic() - began_s
    loaded = [{"name": name, **pair} for name in ("m0", "m1")]
    with _service(loaded) as url:
        asyncio.run(_all_answer(url))
        figures.two_mib = _memory_mib()
    cold = [{"name": f"m{number}", "load": "demand", **pair} for number in range(2, 8)]
    with _service([*loaded, *cold]) as url:
        asyncio.run(_all_answer(url))
        figures.eight_mib = _memory_mib()
        asyncio.run(_load_again(url, figures, num_loads))
    return figures


async def _load_again(url: str, figures: LoadingFigures, num_loads: int) -> None:
    for _ in range(num_loads):
        figures.quiet_tokens_per_s.append(await _tokens_per_s(url, asyncio.create_task(asyncio.sleep(10))))
        load = asyncio.create_task(_timed_answer(url))
        figures.loading_tokens_per_s.append(await _tokens_per_s(url, load))
        figures.first_answer_s.append(load.result())
        began_s = time.monotonic()
        await _post(url, "/v1/models/unload", {"model": _SUBJECT})
        figures.unload_s.append(time.monotonic() - began_s)
        figures.unloaded_mib.append(await asyncio.to_thread(_memory_mib))
        figures.num_processes.append(len(descendants(os.getpid())))


async def _timed_answer(url: str) -> float:
    began_s = time.monotonic()
    await _answer(url, _SUBJECT)
    return time.monotonic() - began_s


async def _tokens_per_s(url: str, until: asyncio.Task[Any]) -> float:
    """Throughput of one client of m0 until a task is done. Raises what the task raises."""
    began_s, num_tokens = time.monotonic(), 0
    while not until.done():
        num_tokens += await _answer(url, "m0")
    until.result()
    return num_tokens / (time.monotonic() - began_s)


async def _all_answer(url: str) -> None:
    for name in ("m0", "m1"):
        await _answer(url, name)


async def _answer(url: str, model: str) -> int:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    answer = await _post(url, "/v1/completions", body)
    return int(answer["usage"]["completion_tokens"])


async def _post(url: str, path: str, body: Mapping[str, object]) -> Any:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as http, http.post(path, json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise EngineLostError(f"{path} of {body['model']}: {answer}")
        return answer


@contextmanager
def _service(models: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    from specray.serving.launch import running_service

    config = _config(models)
    with running_service(config):
        yield f"http://127.0.0.1:{config.http.port}"


def _config(models: Sequence[Mapping[str, Any]]) -> Config:
    values: dict[str, Any] = {"http": {"port": free_port()}, "grpc": {"port": 0}}
    if len(models) == 1:
        # What `specray serve` starts for it alone.
        (only,) = models
        values |= {"served_model_name": only["name"], "target": only["target"], "draft": only["draft"]}
    else:
        values["models"] = [dict(model) for model in models]
    return parse_config(values)


def _memory_mib() -> float:
    time.sleep(SETTLE_S)
    held = [anonymous_bytes(pid) or 0 for pid in descendants(os.getpid())]
    return sum(held) / 2**20


def loading_table(figures: LoadingFigures) -> Table:
    """The figures, and what they are to hold."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    def spread(values: Sequence[float]) -> str:
        return f"{min(values):.1f} to {max(values):.1f}"

    first, quiet = figures.first_answer_s, figures.quiet_tokens_per_s
    growth = median(figures.unloaded_mib[-3:]) - median(figures.unloaded_mib[:3])
    rows = [
        ("service of the model alone: to its first answer, s", figures.alone_s, "", ""),
        ("cold model: to its first answer, s", median(first), spread(first), "1.2 of the first row"),
        ("unload, s", median(figures.unload_s), spread(figures.unload_s), ""),
        ("two models, MiB", figures.two_mib, "", ""),
        ("eight, of which two are loaded, MiB more", figures.eight_mib - figures.two_mib, "", "150"),
        (f"after {len(first)} loads and unloads, MiB more", growth, spread(figures.unloaded_mib), "20"),
        (
            "processes after an unload",
            median(figures.num_processes),
            f"{min(figures.num_processes)} to {max(figures.num_processes)}",
            "the same",
        ),
        ("a neighbour, tokens/s", median(quiet), spread(quiet), ""),
        (
            "a neighbour while a model loads, tokens/s",
            median(figures.loading_tokens_per_s),
            spread(figures.loading_tokens_per_s),
            "",
        ),
    ]
    return grid_of("Loading models", ("", "median", "from to", "at most"), rows, text=("from to", "at most"))
