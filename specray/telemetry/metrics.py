"""Prometheus metrics of the router, in a registry of their own: no globals, several routers per process.

Counters have vLLM's meaning; every rate follows from two of them, for instance the mean acceptance length::

    1 + rate(specray_spec_decode_num_accepted_tokens_total[1m])
      / rate(specray_spec_decode_num_drafts_total[1m])
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specray.engine_info import EngineInfo
from specray.telemetry import counters as counts
from specray.telemetry.adapters import AdapterMetrics
from specray.telemetry.exposition import registry_text
from specray.types import MAX_SPECULATIVE_TOKENS

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_OVERHEAD_S = (
    *(0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.0006, 0.0008, 0.001, 0.0012, 0.0014, 0.0016, 0.0018, 0.002),
    *(0.0022, 0.0024, 0.0026, 0.0028, 0.003, 0.004, 0.005, 0.01, 0.02, 0.05, 0.1, 1),
)


class _Total:
    """A counter of ours that follows one of an engine, which starts anew at 0 when the engine does."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last = 0.0

    def show(self, value: float) -> None:
        """The engine's counter stands at ``value``."""
        self._counter.inc(value - self._last if value >= self._last else value)
        self._last = value


class RouterMetrics:
    """What a router counts. Children of labelled metrics are made once, since rounds are frequent."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._counter = partial(Counter, registry=registry)
        self._gauge = partial(Gauge, registry=registry)
        self._histogram = partial(Histogram, registry=registry)
        self._fast_counter = partial(counts.Counter, registry=registry)
        self._fast_counters = partial(counts.LabelledCounter, registry=registry)
        self._fast_histogram = partial(counts.Histogram, registry=registry)
        self._make_draft_token_metrics()
        self._make_control_metrics()
        self._make_draft_metrics()
        self._make_round_metrics()
        self._make_request_metrics()
        self._make_engine_metrics()

    def text(self) -> str:
        return registry_text(self.registry)

    def _make_draft_token_metrics(self) -> None:
        prefix = "specray_spec_decode_"
        self._drafts = self._fast_counter(f"{prefix}num_drafts", "Rounds that verified draft tokens.")
        self._draft_tokens = self._fast_counter(f"{prefix}num_draft_tokens", "Draft tokens verified.")
        self._accepted = self._fast_counter(
            f"{prefix}num_accepted_tokens", "Draft tokens that are part of an output."
        )
        per_position = self._fast_counters(
            f"{prefix}num_accepted_tokens_per_pos",
            "Draft tokens kept, by their position in the proposal.",
            ["position"],
        )
        self._per_position = [
            per_position.labels(str(position)) for position in range(MAX_SPECULATIVE_TOKENS)
        ]
        self._by_source = tuple(
            self._fast_counters(f"{prefix}{name}_by_source", text, ["source"])
            for name, text in (
                ("num_drafts", "Rounds that verified draft tokens, by what had proposed them."),
                ("num_draft_tokens", "Draft tokens verified, by what had proposed them."),
                ("num_accepted_tokens", "Draft tokens kept, by what had proposed them."),
            )
        )
        self._outcomes = self._counter(
            "specray_outcomes",
            "Verdicts looked up in the outcomes that the draft prepared, by what was found.",
            ["result"],
        )

    def _make_control_metrics(self) -> None:
        self._plans = self._fast_counters(
            "specray_plans",
            "Verdicts, by the plan of their round: how both engines work, the most tokens that are drafted, "
            "and why.",
            ["overlap", "num_speculative_tokens", "reason"],
        )
        self._plan_counters: dict[tuple[str, int, str], counts.Count] = {}
        self._decisions = self._counter(
            "specray_speculation_decisions",
            "Decisions of all sessions together, by their mode: plain, ngram or model.",
            ["mode"],
        )
        self._experiments = self._counter(
            "specray_speculation_experiments",
            "A/B experiments of all sessions, by the mode that was tried and whether they measured a speedup "
            "or were given up.",
            ["tried", "result"],
        )
        self._mode = self._gauge(
            "specray_speculation_mode",
            "As decided last: 0 plain decoding, 1 the n-gram fallback, 2 the draft model.",
        )
        speedup = self._gauge(
            "specray_speculation_speedup",
            "Tokens per second of speculation as a multiple of plain decoding: predicted for the model, "
            "calibrated by experiments, measured in the last experiment.",
            ["kind"],
        )
        self._overlapped = self._gauge(
            "specray_speculation_overlapped",
            "As decided last under overlap auto: 1 where draft and target work at the same time, 0 in turns.",
        )
        self._predicted, self._calibrated, self._measured = (
            speedup.labels(kind) for kind in ("predicted", "calibrated", "measured")
        )

    def _make_draft_metrics(self) -> None:
        self._ahead_depth = self._histogram(
            "specray_draft_ahead_depth",
            "Draft tokens ready when a verdict arrived; 0 after a miss.",
            buckets=(0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32),
        )
        self.draft_lost = self._counter("specray_draft_lost", "Drafts lost or given up.")
        self.draft_leases = self._counter("specray_draft_leases", "Drafts leased.")
        self.draft_moves = self._counter(
            "specray_draft_moves",
            "Drafts left for another: they were to end, or fewer routers share the other.",
        )
        self.draft_refused = self._counter(
            "specray_draft_refused", "Leased drafts that do not fit the target."
        )
        self.draft_connected = self._gauge("specray_draft_connected", "1 while a draft is leased.")

    def _make_round_metrics(self) -> None:
        self.rounds = self._fast_counter("specray_rounds", "Verdicts that committed tokens.")
        self.round_overhead_s = self._fast_histogram(
            "specray_round_overhead_seconds",
            "A round from its first item to its verdict, less the forwards in between.",
            buckets=_OVERHEAD_S,
        )
        self.verify_forward_s = self._histogram(
            "specray_verify_forward_seconds", "Target steps.", buckets=_LATENCY_S
        )
        self.draft_forward_s = self._histogram(
            "specray_draft_forward_seconds", "Draft steps.", buckets=_LATENCY_S
        )
        self.target_idle_s = self._histogram(
            "specray_target_idle_seconds",
            "Between a verdict and the next Verify while sessions run.",
            buckets=_LATENCY_S,
        )
        self.target_lost = self._counter("specray_target_lost", "Targets lost.")
        self.preemptions = self._counter("specray_preemptions", "Sessions put back: no room.")
        self.late_replies = self._counter(
            "specray_late_replies", "Replies that nobody waited for any more.", ["engine"]
        )

    def _make_request_metrics(self) -> None:
        self._requests = self._counter(
            "specray_requests", "Requests ended, by finish reason.", ["finish_reason"]
        )
        self.refused = self._counter("specray_requests_refused", "Requests refused.")
        self.resumed = self._counter(
            "specray_requests_resumed", "Requests whose output a lost router had begun."
        )
        self.expired = self._counter(
            "specray_requests_expired", "Requests whose time was over, waiting or running."
        )
        self.prompt_tokens = self._counter("specray_prompt_tokens", "Prompt tokens admitted.")
        self.output_tokens = self._fast_counter("specray_output_tokens", "Tokens committed.")
        self.ttft_s = self._histogram(
            "specray_time_to_first_token_seconds", "From arrival.", buckets=_LATENCY_S
        )
        self.itl_s = self._fast_histogram(
            "specray_inter_token_latency_seconds",
            "Between commits, shared among the tokens of the later one.",
            buckets=_LATENCY_S,
        )
        self._levels = self._counter(
            "specray_service_levels",
            "Levels of requests that have ended, by kind (ttft or itl) and whether they were kept.",
            ["kind", "attained"],
        )
        self.service_level_yield = self._gauge(
            "specray_service_level_yield",
            "Degree to which sessions with room yield to others: 0 not, 1 no draft tokens, 2 every second "
            "step, 3 every fourth.",
        )
        self.queued_requests = self._gauge("specray_queue_depth", "Requests that wait.")
        self.queued_tokens = self._gauge("specray_queue_tokens", "Prompt tokens of requests that wait.")
        self.running_sessions = self._gauge("specray_running_sessions", "Sessions that run.")

    def _make_engine_metrics(self) -> None:
        self.adapters = AdapterMetrics(self.registry)
        self._blocks_in_use = {
            "target": self._gauge(
                "specray_target_blocks_in_use", "Cache blocks of the target that are taken."
            ),
            "draft": self._gauge(
                "specray_draft_blocks_in_use",
                "Cache blocks of the leased draft that are taken, by other routers too.",
            ),
        }
        self._cache_usage = self._gauge(
            "specray_target_cache_usage_ratio", "Share of the target's cache blocks that is taken."
        )
        self._cache_info = self._gauge(
            "specray_target_cache_info",
            "Tokens of a block of the target's cache, and its blocks; the value is 1.",
            ["block_size", "num_blocks"],
        )
        self._snapshots = self._gauge(
            "specray_target_snapshots",
            "Snapshots of recurrent layers' states by which the target uses prefixes again.",
        )
        evicted = "specray_target_snapshots_evicted", "Snapshots that gave way to others."
        self._snapshots_evicted = _Total(self._counter(*evicted))
        self._step_time_s = self._gauge(
            "specray_step_time_seconds",
            "What the engine's steps took at its start: a Verify by its tokens, a draft token by sequences "
            "side by side.",
            ["engine", "rows"],
        )
        queries, hits = (
            self._counter(f"specray_prefix_cache_{name}", text, ["engine"])
            for name, text in (
                ("queries", "Tokens looked up in the engine's prefix cache, for other routers too."),
                ("hits", "Tokens found there and not computed again."),
            )
        )
        self._prefix_cache = {
            role: (_Total(queries.labels(role)), _Total(hits.labels(role))) for role in self._blocks_in_use
        }
        grammars = {
            field: self._counter(f"specray_grammar_{name}", text, ["engine"])
            for field, name, text in (
                ("compile_s", "compile_seconds", "Seconds that the engine spent on compiling grammars."),
                ("mask_s", "mask_seconds", "Seconds that it spent on masks of legal tokens."),
                ("num_compiled", "compiled", "Grammars that it compiled."),
                ("num_cache_hits", "cache_hits", "Requests whose grammar it had compiled before."),
                ("num_illegal_drafts", "illegal_draft_tokens", "Draft tokens that a grammar forbade."),
            )
        }
        self._grammars = {
            role: [(field, _Total(counter.labels(role))) for field, counter in grammars.items()]
            for role in self._blocks_in_use
        }

    # What happens

    def observe_engine(self, role: str, info: EngineInfo | None) -> None:
        """What the engine in ``role`` (target or draft) says of itself; None: none, or it is silent."""
        self._blocks_in_use[role].set(0 if info is None else info.num_blocks_in_use)
        if role == "target":
            self._cache_info.clear()
            if info is not None:
                self._cache_info.labels(str(info.block_size), str(info.num_blocks)).set(1)
            self._cache_usage.set(info.num_blocks_in_use / info.num_blocks if info and info.num_blocks else 0)
            self._snapshots.set(0 if info is None else info.num_snapshots_held)
            self._snapshots_evicted.show(0 if info is None else info.num_snapshots_evicted)
        if info is not None:
            queries, hits = self._prefix_cache[role]
            queries.show(info.num_prefix_cache_queries)
            hits.show(info.num_prefix_cache_hits)
            for field, total in self._grammars[role]:
                total.show(getattr(info.grammar, field))
            for entry in info.step_times:
                self._step_time_s.labels(role, str(entry.num_rows)).set(entry.seconds)

    def observe_round(self, num_drafts: int, num_accepted: int, source: str = "model") -> None:
        """One verdict of one session; ``source``: model, ngram, suffix, or fallback in place of a model."""
        self.rounds.inc()
        if num_drafts == 0:
            return
        self._drafts.inc()
        self._draft_tokens.inc(num_drafts)
        for counter, amount in zip(self._by_source, (1, num_drafts, num_accepted), strict=True):
            counter.labels(source).inc(amount)
        if num_accepted:
            self._accepted.inc(num_accepted)
            for child in self._per_position[:num_accepted]:
                child.inc()

    def observe_plan(self, overlap: str, num_speculative_tokens: int, reason: str) -> None:
        """One verdict under a plan; ``overlap``: off, serial, ahead or enumerate."""
        plan = (overlap, num_speculative_tokens, reason)
        counter = self._plan_counters.get(plan)
        if counter is None:
            # Looking one up by its labels costs several times the counting.
            labels = overlap, str(num_speculative_tokens), str(reason)
            counter = self._plan_counters[plan] = self._plans.labels(*labels)
        counter.inc()

    def observe_decision(
        self, mode: str, rank: int, *, predicted_speedup: float, calibrated_speedup: float
    ) -> None:
        """All sessions decided for ``mode`` (plain, ngram or model; ``rank``: 0, 1 or 2).

        Args:
            predicted_speedup: tokens per second with the model, as a multiple of plain decoding.
            calibrated_speedup: the same, corrected by experiments.
        """
        self._decisions.labels(mode).inc()
        self._mode.set(rank)
        self._predicted.set(predicted_speedup)
        self._calibrated.set(calibrated_speedup)

    def observe_overlap(self, is_overlapped: bool) -> None:
        self._overlapped.set(is_overlapped)

    def observe_experiment(self, tried: str, measured_speedup: float | None) -> None:
        """An experiment with mode ``tried`` ended; ``measured_speedup``: of speculation; None: given up."""
        self._experiments.labels(tried, "given_up" if measured_speedup is None else "measured").inc()
        if measured_speedup is not None:
            self._measured.set(measured_speedup)

    def observe_lookup(self, result: str, depth: int) -> None:
        """What a verdict found: ``hit``, ``miss_token``, ``miss_count``; or what came of waiting for outcomes
        that were not there yet: ``late_hit``, ``late_miss``, ``timed_out`` or ``draft_lost``.
        """
        self._outcomes.labels(result).inc()
        self._ahead_depth.observe(depth)

    def observe_level(self, kind: str, is_attained: bool) -> None:
        """A request with a level of that kind, ``ttft`` or ``itl``, has ended."""
        self._levels.labels(kind, "true" if is_attained else "false").inc()

    def observe_tokens(self, num_tokens: int, seconds: float) -> None:
        """Tokens committed together, ``seconds`` after those before."""
        self.output_tokens.inc(num_tokens)
        self.itl_s.observe(seconds / num_tokens, times=num_tokens)

    def observe_first_tokens(self, num_tokens: int, seconds: float) -> None:
        """The first tokens of a request, ``seconds`` after its arrival."""
        self.output_tokens.inc(num_tokens)
        self.ttft_s.observe(seconds)

    def observe_end(self, finish_reason: str) -> None:
        """A request ended."""
        self._requests.labels(finish_reason).inc()

    def value(self, name: str, labels: Sequence[tuple[str, str]] = ()) -> float:
        """One sample by its exposed name; 0 when it has not been counted yet."""
        return self.registry.get_sample_value(name, dict(labels)) or 0.0

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """All samples of an exposed name, with their labels."""
        return [
            (sample.labels, sample.value)
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == name
        ]
