"""Runs the stages one after another, each in a process of its own, and keeps the report up to date."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specray.bench.gpu.options import STAGES_WITHOUT_MODEL, Options, parse_options
from specray.bench.gpu.report import Report, problems, write_report
from specray.config import EMBEDDED

_MAX_ERROR_CHARS = 1500
_MAX_TOKENS_FLOAT32 = 64


@dataclass(frozen=True, slots=True)
class Failure(Exception):
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
        """Runs one stage and returns its result. Raises Failure if it ended without one, or took too long."""
        print(f"{label}: {name} ...", file=sys.stderr, flush=True)
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
                print(
                    f"{label}: {name} took {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True
                )
                value: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
                return value
            log.seek(0)
            text = log.read().decode("utf-8", "replace").strip()[-_MAX_ERROR_CHARS:]
        raise Failure(f"{label}: {name}", f"{reason}: {text}" if text else reason)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what still runs of a stage; its workers end when it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10.0)


def measure_shape(shape: str, options: Options, stages: Stages, models: Path, report: Report) -> None:
    """Runs all stages of a shape; one that fails is noted, and the others go on."""
    results: dict[str, Any] = report["shapes"].setdefault(shape, {})

    def stage(key: str, name: str, **arguments: Any) -> None:
        if key != "checkpoint" and key.split()[0] not in options.stages:
            return
        try:
            results[key] = stages.run(f"{shape} {key}", name, **arguments)
        except Failure as failure:
            _note(failure, report)
        write_report(report, options.report)

    stage("checkpoint", "models", shape=shape, directory=str(models), device=options.device)
    if "checkpoint" not in results:
        return
    common = {"path": results["checkpoint"]["path"], "device": options.device}
    is_tiny = shape == "tiny"
    stage("forwards", "forwards", **common, dtype=options.dtype, is_tiny=is_tiny)
    if shape == "1b":
        drafting = {"path": common["path"], "device": options.draft_device, "dtype": options.dtype}
        stage("proposals", "proposals", **drafting, is_tiny=False)
    served = {"num_prompts": options.num_prompts, "max_tokens": options.max_tokens}
    repeated = {**served, "num_repeats": options.num_repeats, "ks": list(options.ks)}
    drafted = {"draft_device": options.draft_device}
    # Weights of 8b in float32 would fill a GPU twice over.
    if options.dtype != "float32" and shape != "8b":
        once = {**served, "max_tokens": min(options.max_tokens, _MAX_TOKENS_FLOAT32), "num_repeats": 1}
        ks = list(options.ks[-1:])
        stage("pair float32", "pair", **common, **drafted, **once, dtype="float32", ks=ks, with_auto=False)
        stage("transformers float32", "peer", **common, **once, dtype="float32", ks=[])
    timed = {**common, **repeated, "dtype": options.dtype}
    stage(f"pair {options.dtype}", "pair", **timed, **drafted, with_auto=not is_tiny)
    stage(f"transformers {options.dtype}", "peer", **timed)


def measure_without_model(name: str, options: Options, stages: Stages, report: Report) -> None:
    """Runs a stage that needs no model."""
    try:
        report[name] = stages.run(name, name, device=options.device, is_tiny=options.shapes == ("tiny",))
    except Failure as failure:
        _note(failure, report)
    write_report(report, options.report)


def measure_proposals(options: Options, stages: Stages, report: Report) -> None:
    """Runs the stage that needs the draft alone."""
    try:
        report["proposals"] = stages.run(
            "proposals",
            "proposals",
            path=EMBEDDED,
            device=options.draft_device,
            dtype=options.dtype,
            is_tiny=options.shapes == ("tiny",),
        )
    except Failure as failure:
        _note(failure, report)
    write_report(report, options.report)


def _note(failure: Failure, report: Report) -> None:
    print(f"{failure.stage} failed: {failure.reason}", file=sys.stderr, flush=True)
    report["failures"].append({"stage": failure.stage, "reason": failure.reason})


def main() -> int:
    """Runs everything. Returns 1 if a stage failed or float32 outputs differ, else 0."""
    options = parse_options()
    try:
        options.report.mkdir(parents=True, exist_ok=True)
        if options.models is not None:
            options.models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"specray: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    values = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    for private in ("report", "models"):
        del values[private]
    report: Report = {"options": values, "shapes": {}, "failures": []}
    with tempfile.TemporaryDirectory(prefix="specray-gpu-") as name:
        stages = Stages(Path(name), options.stage_timeout_s)
        for stage in STAGES_WITHOUT_MODEL:
            if stage in options.stages:
                measure_without_model(stage, options, stages, report)
        if "proposals" in options.stages:
            measure_proposals(options, stages, report)
        of_shapes = set(options.stages) - {*STAGES_WITHOUT_MODEL, "proposals"}
        for shape in options.shapes:
            if not of_shapes and (shape != "1b" or "proposals" not in options.stages):
                continue
            measure_shape(shape, options, stages, options.models or Path(name), report)
    for problem in problems(report):
        print(f"specray: {problem}", file=sys.stderr)
    print(f"the report is in {options.report / 'report.md'}", file=sys.stderr)
    return 1 if problems(report) else 0


if __name__ == "__main__":
    sys.exit(main())
