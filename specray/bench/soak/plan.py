"""What a soak is asked for. Its fields are the options of ``specray bench soak``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specray.bench.core.options import Seed
from specray.bench.soak.schedule import ALL_FAULTS, FaultKind, parse_faults
from specray.bench.testbed.kinds import BedKind
from specray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SoakPlan:
    duration: Annotated[
        float,
        typer.Option(min=10, max=86_400, help="Seconds of load; it goes on until the last fault is over."),
    ] = 600.0
    faults: Annotated[str, typer.Option(help="Kinds of faults, separated by commas; or all, none.")] = (
        ALL_FAULTS
    )
    num_faults: Annotated[int, typer.Option(min=0, max=10_000, help="Number of faults in all.")] = 30
    seed: Seed = 0
    testbed: Annotated[
        BedKind,
        typer.Option(help="processes: one node; cluster: two nodes; namespaces: two hosts (needs root)."),
    ] = BedKind.PROCESSES
    num_clients: Annotated[int, typer.Option(min=1, max=256, help="Requests at a time.")] = 4
    num_models: Annotated[
        int,
        typer.Option(min=1, max=8, help="Models in one service: the pair, and targets with other weights."),
    ] = 1
    num_cases: Annotated[int, typer.Option(min=1, max=1000, help="Number of different requests.")] = 24
    cancel_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the requests that their clients cancel.")
    ] = 0.15
    calm: Annotated[float, typer.Option(min=0, help="Seconds of load before the first fault.")] = 20.0
    warmup: Annotated[
        float,
        typer.Option(
            min=0,
            help="Age of a process in seconds from which its memory is compared. If every kind of fault "
            "comes at least twice, each kind must have come once before, too.",
        ),
    ] = 120.0
    recovery_timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds in which the service must be whole again after a fault."),
    ] = 60.0
    """The loss of a Router or an Ingress excuses errors for as long."""
    request_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds in which a request must have ended, a load included.")
    ] = 90.0
    max_requests: Annotated[int, typer.Option(min=1, help="Maximum requests in all.")] = 20_000
    max_growth: Annotated[
        float, typer.Option(min=0, help="Share of its memory by which a process may grow.")
    ] = 0.02
    logs: Annotated[Path | None, typer.Option(help="Directory for the logs of the service.")] = None

    def __post_init__(self) -> None:
        """Raises ConfigError for faults or models that the bed cannot have."""
        if self.num_models > 1 and self.testbed is not BedKind.PROCESSES:
            raise ConfigError(f"--num-models is {self.num_models}; allowed on the test bed {self.testbed}: 1")
        if self.faults != "none":
            self._parsed()

    @property
    def kinds(self) -> tuple[FaultKind, ...]:
        return () if self.faults == "none" else self._parsed()

    def _parsed(self) -> tuple[FaultKind, ...]:
        return parse_faults(self.faults, self.testbed, num_models=self.num_models)

    @property
    def rehearsal(self) -> int:
        """Number of faults before memory is compared: each kind once, if each comes again.

        What a process loads at its first fault of a kind stays: classes, and source lines for tracebacks, of
        which Serve's controller reads a megabyte. Memory that grows with every fault shows after it.
        """
        return len(self.kinds) if self.num_faults >= 2 * len(self.kinds) else 0
