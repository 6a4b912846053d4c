"""``specray bench``: the group of benchmark commands."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from specray.cli.bench.compare import compare
from specray.cli.bench.gpu import gpu
from specray.cli.bench.methods import methods, prediction
from specray.cli.bench.overlap import overlap
from specray.cli.bench.parts import adapters, drafting, forwards, idle, prefix, quantization, router, rpc
from specray.cli.bench.serve import loading, overload, plain, routing, scaling, serve, structured
from specray.cli.bench.soak import soak
from specray.cli.bench.trace import trace


class _ServeByDefault(TyperGroup):
    """Reads ``specray bench [OPTIONS]`` as ``specray bench serve [OPTIONS]``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["serve", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    cls=_ServeByDefault,
    help="Benchmarks: a running server (serve, the default), other services, and single parts of this one.",
)
_COMMANDS = (
    *(serve, compare, methods, overlap, trace, soak, overload, plain, prediction, structured),
    *(forwards, adapters, quantization, prefix, drafting, router, routing, scaling, loading, rpc, idle, gpu),
)
for command in _COMMANDS:
    app.command()(command)
