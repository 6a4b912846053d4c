"""Compares what `specray plan` predicts with what is measured: the same pair, requests and clients.

Measured through a router in this process with the workers beside it, without HTTP and Serve, which a profile
does not include.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from specray.bench.capacity import NUM_PASSES
from specray.bench.core.arm import without_cache
from specray.bench.core.figures import percentile
from specray.config import Config
from specray.planning.load import ClosedLoad, FixedLength, ListedLength
from specray.planning.simulation.fleet import Kit
from specray.planning.simulation.results import RunResult
from specray.planning.simulation.runs import simulate_closed
from specray.requests import GenerateRequest
from specray.router import Router
from specray.serving.local.pair import LocalPair, local_pair
from specray.tokenization import load_tokenizer
from specray.types import SamplingParams


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One load. Rates are output tokens per second; times are medians in milliseconds."""

    concurrency: int
    num_requests: int
    measured_tokens_per_s: float
    """Median rate over the passes, as in a profile."""
    measured_of_passes: tuple[float, ...]
    predicted_tokens_per_s: float
    measured_ttft_ms: float
    predicted_ttft_ms: float

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measurement."""
        return self.predicted_tokens_per_s / self.measured_tokens_per_s - 1


@dataclass(frozen=True, slots=True)
class LoadPass:
    tokens_per_s: float
    ttft_ms: float
    """Median time to first token in milliseconds."""


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    prompt_lens: tuple[int, ...]
    max_tokens: int
    temperature: float
    passes: Mapping[int, Sequence[LoadPass]]
    """Passes by number of clients."""


class LoadRunner:
    """Serves prompts with a pair, a number of clients at a time; each load has a fresh router.

    Args:
        config: configuration of the pair, and how it speculates.
        prompts: prompts, repeated from the first if there are more requests.
        concurrency: numbers of clients; each makes one load.
        max_tokens: output tokens per request.
        temperature: sampling temperature.
        progress: called with the name of the next part.
    """

    def __init__(
        self,
        config: Config,
        prompts: Sequence[str],
        *,
        concurrency: Sequence[int],
        max_tokens: int,
        temperature: float,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config = config
        tokenizer = load_tokenizer(config.target.model)
        self._prompts = [tuple(tokenizer.encode(prompt)) for prompt in prompts]
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._progress = progress
        self._passes: dict[int, list[LoadPass]] = {count: [] for count in concurrency}

    @property
    def measured(self) -> MeasuredPair:
        return MeasuredPair(tuple(map(len, self._prompts)), self._max_tokens, self._temperature, self._passes)

    async def run_pass(self, pair: LocalPair) -> None:
        """Serves every load once."""
        for count, passes in self._passes.items():
            self._progress(f"{count} at a time, pass {len(passes) + 1}")
            router = pair.router(self._config)
            await router.start()
            try:
                one = await _measure(router, self._prompts, count, self._max_tokens, self._temperature)
            finally:
                await router.stop()
            passes.append(one)


async def measure_loads(runner: LoadRunner, config: Config, *, num_passes: int = NUM_PASSES) -> MeasuredPair:
    """Starts the pair and serves all loads, in turns.

    Raises like ``local_pair``.
    """
    async with local_pair(without_cache(config)) as pair:
        for _ in range(num_passes):
            await runner.run_pass(pair)
    return runner.measured


def compare(kit: Kit, measured: MeasuredPair) -> list[CheckRow]:
    """Simulates what was measured; one row per number of clients."""
    return [_row(kit, measured, count, passes) for count, passes in measured.passes.items()]


def _num_requests(concurrency: int, num_prompts: int) -> int:
    """Returns the requests of a load; at least each prompt once: acceptance differs much between outputs."""
    return max(num_prompts, 3 * concurrency)


async def _measure(
    router: Router, prompts: Sequence[tuple[int, ...]], concurrency: int, max_tokens: int, temperature: float
) -> LoadPass:
    """Runs a pass without stop tokens, so that every output has ``max_tokens``."""
    count = _num_requests(concurrency, len(prompts))
    waiting = iter(list(enumerate(itertools.islice(itertools.cycle(prompts), count))))
    num_tokens = 0
    ttft_ms: list[float] = []

    async def work() -> None:
        nonlocal num_tokens
        for index, prompt in waiting:
            sampling = SamplingParams(temperature=temperature, seed=index, num_prompt_tokens=len(prompt))
            # Whole outputs: passing chunks on is the Ingress's work, which a profile does not include.
            output = await router.complete(GenerateRequest(f"check-{index}", prompt, sampling, max_tokens))
            num_tokens += len(output.token_ids)
            if output.ttft_s is not None:
                ttft_ms.append(1e3 * output.ttft_s)

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return LoadPass(num_tokens / (time.perf_counter() - started_s), percentile(ttft_ms, 50))


def _row(kit: Kit, measured: MeasuredPair, concurrency: int, passes: Sequence[LoadPass]) -> CheckRow:
    count = _num_requests(concurrency, len(measured.prompt_lens))
    load = ClosedLoad(
        concurrency,
        count,
        ListedLength(measured.prompt_lens[:count]),
        FixedLength(measured.max_tokens),
        measured.temperature,
    )
    runs = [simulate_closed(kit, load, num_drafts=int(kit.draft is not None), seed=seed) for seed in range(5)]
    return CheckRow(
        concurrency=concurrency,
        num_requests=count,
        measured_tokens_per_s=median(one.tokens_per_s for one in passes),
        measured_of_passes=tuple(one.tokens_per_s for one in passes),
        predicted_tokens_per_s=_mean_rate(runs),
        measured_ttft_ms=median(one.ttft_ms for one in passes),
        predicted_ttft_ms=median(run.ttft_ms.p50 for run in runs if run.ttft_ms is not None),
    )


def _mean_rate(runs: Sequence[RunResult]) -> float:
    return sum(run.tokens_per_s * run.window_s for run in runs) / sum(run.window_s for run in runs)
