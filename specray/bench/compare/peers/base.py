"""The interface of a server to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specray.errors import ConfigError
from specray.types import MAX_SPECULATIVE_TOKENS

PLAIN = "plain"
"""Name of the mode without speculation; every system has it."""
DEFAULT_NUM_SPECULATIVE_TOKENS = 4
BFLOAT16 = "bfloat16"
"""Name of the weights that every system has."""
GGUF = "gguf"
"""Name of the weights of a GGUF file, in its own bits."""


@dataclass(frozen=True, slots=True)
class PeerArm:
    system: str
    mode: str
    num_speculative_tokens: int | None = None
    """Number of draft tokens K; None leaves it to the system, or takes ``DEFAULT_NUM_SPECULATIVE_TOKENS``."""
    weights: str = BFLOAT16
    """Format in which the weights are held."""

    @property
    def name(self) -> str:
        """Name of the arm for people: ``vllm draft K=4``, ``specray plain int4``."""
        k = self.num_speculative_tokens
        parts = [self.system, self.mode]
        parts += [] if k is None else [f"K={k}"]
        return " ".join(parts if self.weights == BFLOAT16 else [*parts, self.weights])

    @property
    def k(self) -> int:
        k = self.num_speculative_tokens
        return DEFAULT_NUM_SPECULATIVE_TOKENS if k is None else k


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that all systems share."""

    target: Path
    """Checkpoint directory with config, tokenizer, and safetensors or a GGUF file."""
    draft: Path
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    """Largest number of requests at a time in this run."""
    work_dir: Path
    """Directory for converted checkpoints and the servers' logs."""


def stored_file(checkpoint: Path) -> Path | None:
    """The GGUF file of a checkpoint that has its weights there; None: it has safetensors."""
    path = checkpoint / "model.gguf"
    return path if path.exists() else None


@dataclass(frozen=True, slots=True)
class Launch:
    """The command that starts a server, and the server's address."""

    command: tuple[str, ...]
    url: str
    ready_path: str
    environment: Mapping[str, str]
    """Environment variables added to our own."""

    @property
    def argv(self) -> tuple[str, ...]:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return ("env", *variables, *self.command) if variables else self.command


class System(Protocol):
    """One server program; stateless."""

    @property
    def name(self) -> str: ...

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes of the system; the first is ``plain``."""

    @property
    def weights(self) -> tuple[str, ...]:
        """Formats of weights that can be asked for; the first is ``bfloat16``."""

    @property
    def max_concurrency(self) -> int | None:
        """Largest number of requests at a time; None: no limit."""

    def absence(self) -> str | None:
        """Returns why the system cannot be measured here; None if it can."""

    def prepare(self, setup: Setup, arms: Sequence[PeerArm]) -> None:
        """Makes what its servers in these arms need beside the checkpoints. Raises ConfigError."""

    def launch(self, arm: PeerArm, setup: Setup, port: int) -> Launch:
        """Returns the command of a server in this mode that listens on this port of 127.0.0.1."""

    def request_fields(self, temperature: float) -> dict[str, Any]:
        """Returns the fields of a request that samples the whole distribution, or takes the argmax."""


def parse_arm(text: str, systems: Mapping[str, System]) -> PeerArm:
    """Reads ``SYSTEM:MODE[:K][@WEIGHTS]``. Raises ConfigError, naming what is allowed."""
    unweighted, _, weights = text.partition("@")
    name, _, rest = unweighted.partition(":")
    mode, _, k = rest.partition(":")
    if name not in systems:
        raise ConfigError(f"--arm {text}: there is no system {name!r}; allowed: {', '.join(systems)}")
    if mode not in systems[name].modes:
        raise ConfigError(
            f"--arm {text}: {name} has no mode {mode!r}; allowed: {', '.join(systems[name].modes)}"
        )
    if k and not (k.isdecimal() and 1 <= int(k) <= MAX_SPECULATIVE_TOKENS):
        raise ConfigError(f"--arm {text}: K is {k!r}; allowed: 1..{MAX_SPECULATIVE_TOKENS}")
    weights = weights or BFLOAT16
    if weights not in systems[name].weights:
        raise ConfigError(
            f"--arm {text}: {name} has no weights {weights!r}; allowed: {', '.join(systems[name].weights)}"
        )
    return PeerArm(name, mode, int(k) if k else None, weights)
