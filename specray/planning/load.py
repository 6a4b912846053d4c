"""Describes a load: lengths of prompts and outputs, and the requests' arrivals."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specray.errors import ConfigError

MAX_TOKENS = 1_000_000
MAX_PREFIXES = 500
_FIRST_SHARED = 1 << 29
"""First token of the first shared prefix: no output has those."""
_Z95 = 1.6448536269514722
"""95th percentile of the standard normal distribution."""


class Lengths(Protocol):
    """A distribution of request lengths."""

    @property
    def mean(self) -> float: ...

    def draw(self, rng: random.Random, limit: int) -> int:
        """Draws a number of tokens in 1..limit."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """A constant length."""

    num_tokens: int

    @property
    def mean(self) -> float:
        return float(self.num_tokens)

    def draw(self, rng: random.Random, limit: int) -> int:
        return min(self.num_tokens, limit)


@dataclass(frozen=True, slots=True)
class LognormalLength:
    """A lognormal distribution, as request lengths often have; a length over the limit is drawn again."""

    mean: float
    p95: float

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm; the smaller of the two that give this mean and percentile."""
        return _Z95 - math.sqrt(_Z95**2 - 2 * math.log(self.p95 / self.mean))

    def draw(self, rng: random.Random, limit: int) -> int:
        sigma = self.sigma
        for _ in range(100):
            num_tokens = max(1, round(rng.lognormvariate(math.log(self.mean) - sigma**2 / 2, sigma)))
            if num_tokens <= limit:
                return num_tokens
        return limit


@dataclass(frozen=True, slots=True)
class ListedLength:
    """One of the given lengths, each equally likely."""

    seen: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(self.seen) / len(self.seen)

    def draw(self, rng: random.Random, limit: int) -> int:
        return min(rng.choice(self.seen), limit)


def parse_lengths(text: str, option: str) -> Lengths:
    """Reads ``512``, ``lognormal:400,1200`` (mean, 95th percentile), or ``@FILE`` with one number per line.

    In a file of JSON lines the entry with the option's name counts (``{"prompt": 512, "output": 128}``).

    Raises:
        ConfigError: names the option, its value and what is allowed.
    """
    if text.startswith("@"):
        return ListedLength(_read_lengths(Path(text[1:]), option))
    kind, colon, rest = text.partition(":")
    if kind == "lognormal" and colon:
        return _parse_lognormal(text, rest, option)
    if not text.isdecimal() or not 1 <= int(text) <= MAX_TOKENS:
        raise ConfigError(
            f"--{option} is {text!r}; allowed: a number of tokens in 1..{MAX_TOKENS}, lognormal:MEAN,P95 or"
            " @FILE"
        )
    return FixedLength(int(text))


def _parse_lognormal(text: str, rest: str, option: str) -> LognormalLength:
    try:
        mean, p95 = (float(part) for part in rest.split(","))
    except ValueError:
        raise ConfigError(f"--{option} is {text!r}; allowed: lognormal:MEAN,P95") from None
    highest = math.exp(_Z95**2 / 2)
    if not 1 <= mean <= MAX_TOKENS or not mean < p95 <= highest * mean:
        raise ConfigError(
            f"--{option} is {text!r}; allowed: a mean in 1..{MAX_TOKENS} and a P95 above it, at most"
            f" {highest:.2f} times as large"
        )
    return LognormalLength(mean, p95)


def _read_lengths(path: Path, option: str) -> tuple[int, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{option} {path}: {getattr(error, 'strerror', None) or error}") from None
    lengths = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        value = entry.get(option) if isinstance(entry, dict) else entry
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
            raise ConfigError(
                f"--{option} {path}, line {number}: {line.strip()[:60]!r}; allowed: a number in"
                f" 1..{MAX_TOKENS}, or a JSON object with one as {option!r}"
            )
        lengths.append(value)
    if not lengths:
        raise ConfigError(f"--{option} {path}: there is no number in it")
    return tuple(lengths)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Beginnings that many prompts share, such as system prompts; each is drawn as often as any other.

    Attributes:
        number: of different prefixes, >= 1.
        num_tokens: of each.
        share: share of the requests that begin with one, in (0, 1].
    """

    number: int
    num_tokens: int
    share: float = 1.0

    def draw(self, rng: random.Random, limit: int) -> tuple[int, ...]:
        """The beginning of one prompt of at most ``limit`` tokens; empty: it shares nothing."""
        if rng.random() >= self.share:
            return ()
        first = _FIRST_SHARED + rng.randrange(self.number) * MAX_TOKENS
        return tuple(range(first, first + min(self.num_tokens, limit)))


def parse_prefixes(text: str) -> SharedPrefixes:
    """Reads ``NUMBER,TOKENS`` or ``NUMBER,TOKENS,SHARE``. Raises ConfigError."""
    try:
        number, num_tokens, share = (*text.split(","), "1")[:3]
        prefixes = SharedPrefixes(int(number), int(num_tokens), float(share))
    except ValueError:
        prefixes = SharedPrefixes(0, 0, 0.0)
    is_in_range = 1 <= prefixes.number <= MAX_PREFIXES and 1 <= prefixes.num_tokens <= MAX_TOKENS
    if not is_in_range or not 0 < prefixes.share <= 1 or text.count(",") > 2:
        raise ConfigError(
            f"--shared-prefixes is {text!r}; allowed: NUMBER,TOKENS or NUMBER,TOKENS,SHARE with a number in"
            f" 1..{MAX_PREFIXES}, tokens in 1..{MAX_TOKENS} and a share of the requests in (0, 1]"
        )
    return prefixes


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """Requests that arrive whatever the service does.

    ``is_poisson`` False: at equal intervals.
    """

    rate_per_s: float
    prompt: Lengths
    output: Lengths
    temperature: float = 0.0
    is_poisson: bool = True
    prefixes: SharedPrefixes | None = None

    def arrivals(self, rng: random.Random) -> Iterator[float]:
        """Yields each request's arrival in seconds from now, without end."""
        now = 0.0
        while True:
            now += rng.expovariate(self.rate_per_s) if self.is_poisson else 1 / self.rate_per_s
            yield now


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """A number of clients, each with one request at a time, until ``num_requests`` have been served."""

    concurrency: int
    num_requests: int
    prompt: Lengths
    output: Lengths
    temperature: float = 0.0
    prefixes: SharedPrefixes | None = None
