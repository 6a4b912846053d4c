"""Runs the stages one after another, each in a process of its own, and writes the report after each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specray.bench.core.report import values_of
from specray.bench.gpu.report import Report, problems, write_report
from specray.config import EMBEDDED

_MAX_ERROR_CHARS = 1500

_ONCE = ("sampling", "attention", "products", "experts", "recurrent")
"""Stages that need no model, and are measured once, whatever the shape of the target."""


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What is measured."""

    report: Path
    """Directory for ``report.md`` and ``report.json``."""
    shapes: tuple[str, ...]
    """Sizes of the target."""
    stages: tuple[str, ...]
    device: str = "cuda"
    draft_device: str = "cuda"
    dtype: str = "bfloat16"
    """Number format of the weights that are timed."""
    num_prompts: int = 8
    max_tokens: int = 128
    num_repeats: int = 2
    ks: tuple[int, ...] = (2, 4)
    """Numbers of draft tokens (K) to measure."""
    models: Path | None = None
    """Directory for inflated checkpoints; None: a temporary one."""
    stage_timeout_s: float = 480.0
    """Seconds for any one stage."""


@dataclass(frozen=True, slots=True)
class StageFailure(Exception):
    """A stage without a result."""

    stage: str
    reason: str


class Stages:
    """Starts stages and waits for them.

    Args:
        directory: directory for their results and logs.
        timeout_s: seconds allowed for each.
    """

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s

    def run(self, label: str, name: str, **arguments: Any) -> dict[str, Any]:
        """Runs one stage and returns its result. Raises StageFailure if it gave none, or took too long."""
        _say(f"{label}: {name} ...")
        began = time.perf_counter()
        result = self._directory / "result.json"
        result.unlink(missing_ok=True)
        with tempfile.TemporaryFile(dir=self._directory) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "specray.bench.gpu.stage", name, str(result)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                process.communicate(json.dumps(arguments).encode(), timeout=self._timeout_s)
                reason = f"it ended with status {process.returncode}"
            except subprocess.TimeoutExpired:
                reason = f"it took more than {self._timeout_s:g} s"
            finally:
                _end(process)
            if process.returncode == 0 and result.is_file():
                _say(f"{label}: {name} took {time.perf_counter() - began:.1f} s")
                value: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
                return value
            log.seek(0)
            text = log.read().decode("utf-8", "replace").strip()[-_MAX_ERROR_CHARS:]
        raise StageFailure(f"{label}: {name}", f"{reason}: {text}" if text else reason)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what still runs of a stage; its workers end when it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10.0)


def measure_gpu(plan: GpuPlan) -> list[str]:
    """Runs everything; returns what is wrong: stages that failed, and float32 outputs that differ."""
    for directory in (plan.report, *([] if plan.models is None else [plan.models])):
        directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="specray-gpu-") as name:
        run = _StageRun(plan, Stages(Path(name), plan.stage_timeout_s), plan.models or Path(name))
        run.all()
    found = problems(run.report)
    for problem in found:
        _say(f"specray: {problem}")
    _say(f"the report is in {plan.report / 'report.md'}")
    return found


class _StageRun:
    def __init__(self, plan: GpuPlan, stages: Stages, models: Path) -> None:
        self._plan = plan
        self._stages = stages
        self._models = models
        options = values_of(plan, without=("report", "models"))
        self.report: Report = {"options": options, "shapes": {}, "failures": []}

    def all(self) -> None:
        plan = self._plan
        is_tiny = all(shape.startswith("tiny") for shape in plan.shapes)
        for name in _ONCE:
            self._stage(name, name, device=plan.device, is_tiny=is_tiny)
        drafting = {"device": plan.draft_device, "dtype": plan.dtype}
        self._stage("proposals", "proposals", path=EMBEDDED, **drafting, is_tiny=is_tiny)
        of_shapes = set(plan.stages) - {*_ONCE, "proposals"}
        for shape in plan.shapes:
            if of_shapes or (shape == "1b" and "proposals" in plan.stages):
                self._shape(shape)

    def _stage(self, key: str, name: str, *, shape: str | None = None, **arguments: Any) -> None:
        """Runs one stage, if it is asked for; one that fails is noted, and the others go on."""
        if key != "checkpoint" and key.split()[0] not in self._plan.stages:
            return
        results = self.report if shape is None else self.report["shapes"].setdefault(shape, {})
        label = key if shape is None else f"{shape} {key}"
        try:
            results[key] = self._stages.run(label, name, **arguments)
        except StageFailure as failure:
            _say(f"{failure.stage} failed: {failure.reason}")
            self.report["failures"].append({"stage": failure.stage, "reason": failure.reason})
        write_report(self.report, self._plan.report)

    def _shape(self, shape: str) -> None:
        plan, device = self._plan, self._plan.device
        self._stage(
            "checkpoint", "models", shape=shape, size=shape, directory=str(self._models), device=device
        )
        made = self.report["shapes"].setdefault(shape, {}).get("checkpoint")
        if made is None:
            return
        common = {"shape": shape, "path": made["path"], "device": device}
        is_tiny = shape.startswith("tiny")
        # The linear layers alone are no bound of a mixture; its experts have a stage of their own.
        if not shape.endswith("moe"):
            self._stage("forwards", "forwards", **common, dtype=plan.dtype, is_tiny=is_tiny)
        self._stage("determinism", "determinism", **common, dtype=plan.dtype, is_tiny=is_tiny)
        if shape == "1b":
            drafting = {**common, "device": plan.draft_device, "dtype": plan.dtype}
            self._stage("proposals", "proposals", **drafting, is_tiny=False)
        load = {"num_prompts": plan.num_prompts, "max_tokens": plan.max_tokens}
        drafted = {"draft_device": plan.draft_device}
        # Weights of these in float32 would fill a GPU twice over.
        if plan.dtype != "float32" and shape not in ("8b", "moe"):
            once = {**load, "max_tokens": min(plan.max_tokens, 64), "num_repeats": 1}
            exact = {**common, **once, "dtype": "float32"}
            self._stage("pair float32", "pair", **exact, **drafted, ks=plan.ks[-1:], with_auto=False)
            self._stage("transformers float32", "peer", **exact, ks=())
        timed = {**common, **load, "num_repeats": plan.num_repeats, "ks": plan.ks, "dtype": plan.dtype}
        self._stage(f"pair {plan.dtype}", "pair", **timed, **drafted, with_auto=not is_tiny)
        self._stage(f"transformers {plan.dtype}", "peer", **timed)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
