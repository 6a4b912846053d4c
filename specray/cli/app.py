"""The ``specray`` program: all its commands, and how it reports their errors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from specray import __version__
from specray.cli.adapters import app as adapters_app
from specray.cli.advise.app import advise
from specray.cli.bench.app import app as bench_app
from specray.cli.ending import EXIT_FAILED, Guardian
from specray.cli.generate import generate
from specray.cli.keys import app as keys_app
from specray.cli.models.app import app as models_app
from specray.cli.plan import plan
from specray.cli.profile import profile
from specray.cli.reload import reload
from specray.cli.serve import serve
from specray.cli.train.commands import app as train_app
from specray.cli.verify import verify
from specray.cli.worker import worker
from specray.errors import ConfigError, InvalidRequestError, SpecrayError

EXIT_WRONG_INPUT = 2

app = typer.Typer(
    name="specray",
    help="Speculative decoding as a distributed service on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(reload)
app.command()(generate)
app.command()(worker)
app.command()(profile)
app.command()(plan)
app.command()(verify)
app.command()(advise)
app.add_typer(keys_app, name="keys")
app.add_typer(models_app, name="models")
app.add_typer(adapters_app, name="adapters")
app.add_typer(train_app, name="train")
app.add_typer(bench_app, name="bench")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"specray {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding as a distributed service on Ray."""


@functools.cache
def command_line() -> Any:
    """All commands, made of their functions' signatures once in a process: it takes a tenth of a second."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str] | None = None, guardian: Guardian | None = None) -> int:
    """Runs a command and prints its error, if any, as one line on stderr.

    Args:
        guardian: for `specray serve`, which says to it how long its end may take.

    Returns:
        The exit code: 0, 2 for wrong input, 1 for another failure, 130 after an interrupt.
    """
    try:
        command_line()(args=None if arguments is None else list(arguments), obj=guardian)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except (ConfigError, InvalidRequestError) as error:
        return _fail(error, EXIT_WRONG_INPUT)
    except SpecrayError as error:
        return _fail(error, EXIT_FAILED)
    return 0


def _fail(error: Exception, exit_code: int) -> int:
    print(f"specray: {error}", file=sys.stderr)
    return exit_code
