"""What a system to compare is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specray.errors import ConfigError
from specray.types import MAX_SPECULATIVE_TOKENS

PLAIN = "plain"
"""The mode without speculation, of every system."""
DEFAULT_NUM_SPECULATIVE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Arm:
    """One system in one mode."""

    system: str
    mode: str
    num_speculative_tokens: int | None = None
    """K; None leaves it to the system (or ``DEFAULT_NUM_SPECULATIVE_TOKENS`` where it has no choice)."""

    @property
    def name(self) -> str:
        """For people: ``vllm draft K=4``."""
        k = self.num_speculative_tokens
        return f"{self.system} {self.mode}" + ("" if k is None else f" K={k}")

    @property
    def k(self) -> int:
        """K of a system that wants a number."""
        k = self.num_speculative_tokens
        return DEFAULT_NUM_SPECULATIVE_TOKENS if k is None else k


@dataclass(frozen=True, slots=True)
class Setup:
    """What every system is given alike."""

    target: Path
    """Checkpoint directory: config, safetensors, tokenizer."""
    draft: Path
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    """Most requests at a time in this run."""
    work_dir: Path
    """For converted checkpoints and the servers' logs."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started, and where it is then."""

    command: tuple[str, ...]
    url: str
    ready_path: str
    environment: Mapping[str, str]
    """Added to our own."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command line, as it can be repeated in a shell."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return ("env", *variables, *self.command) if variables else self.command


class System(Protocol):
    """One server program; stateless."""

    @property
    def name(self) -> str: ...

    @property
    def modes(self) -> tuple[str, ...]:
        """The first one is ``plain``."""

    @property
    def max_concurrency(self) -> int | None:
        """Most requests that it serves at a time; None: as many as it is asked for."""

    def absence(self) -> str | None:
        """Why it cannot be measured here; None when it can."""

    def prepare(self, setup: Setup) -> None:
        """Makes what its server needs beside the checkpoints. Raises ConfigError when that fails."""

    def launch(self, arm: Arm, setup: Setup, port: int) -> Launch:
        """The command line of a server in this mode, listening on this port of 127.0.0.1."""

    def request_fields(self, temperature: float) -> dict[str, Any]:
        """What a request must say so that the whole distribution is sampled, or the argmax taken."""


def parse_arm(text: str, systems: Mapping[str, System]) -> Arm:
    """``SYSTEM:MODE`` or ``SYSTEM:MODE:K``. Raises ConfigError naming what is allowed."""
    name, _, rest = text.partition(":")
    mode, _, k = rest.partition(":")
    if name not in systems:
        raise ConfigError(f"--arm {text}: there is no system {name!r}; allowed: {', '.join(systems)}")
    if mode not in systems[name].modes:
        raise ConfigError(
            f"--arm {text}: {name} has no mode {mode!r}; allowed: {', '.join(systems[name].modes)}"
        )
    if k and not (k.isdecimal() and 1 <= int(k) <= MAX_SPECULATIVE_TOKENS):
        raise ConfigError(f"--arm {text}: K is {k!r}; allowed: 1..{MAX_SPECULATIVE_TOKENS}")
    return Arm(name, mode, int(k) if k else None)
