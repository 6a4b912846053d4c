"""Sends what schemathesis makes of the OpenAPI document to a real service; run by ``make fuzz``.

Fails on any answer that is an error of the service, and on an actor that died.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

from specray.bench.compare.peers.process import free_port

HOOKS = Path(__file__).parent / "hooks.py"
NUM_BODIES = 7
"""Operations of the document that read a body; the others have one case each."""
ENGINE = {"model": "embedded", "dtype": "float32", "max_model_len": 512, "num_threads": 1, "profile_s": 0.5}
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
LOSSES = ("specray_target_lost_total", "specray_draft_lost_total")


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Runs ``specray serve`` with the embedded pair while the block runs; yields its URL when it is ready."""
    port = free_port()
    config = {
        "target": ENGINE,
        "draft": ENGINE,
        "http": {"port": port, "openapi": True},
        "grpc": {"port": 0},
        "router": {"start_timeout_s": START_TIMEOUT_S},
    }
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fuzz.yaml")
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        service = subprocess.Popen([sys.executable, "-m", "specray.cli", "serve", str(path)])
        try:
            _wait_until_ready(url, service)
            yield url
        finally:
            service.send_signal(signal.SIGINT)
            try:
                service.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                service.kill()


def _wait_until_ready(url: str, service: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and service.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            _get(url, "/ready")
            return
        time.sleep(0.5)
    raise SystemExit("the service did not start")


def _get(url: str, path: str) -> str:
    with urllib.request.urlopen(f"{url}{path}", timeout=60) as response:
        text: str = response.read().decode()
    return text


def actors(metrics: str) -> set[tuple[str, str]]:
    """Deployments and replicas that show metrics; one that died has a successor of another name."""
    return {
        (found[1], found[2]) for found in re.finditer(r'deployment="(\w+)"[^}]*replica="([^"]+)"', metrics)
    }


def total(metrics: str, name: str) -> float:
    """Sum of a metric's samples."""
    samples = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)", metrics, re.MULTILINE)
    return sum(map(float, samples))


def fuzz(schemathesis: str, url: str, *, num_cases: int, seed: int | None) -> int:
    """Returns schemathesis' exit status, or 1 if an actor died or too few cases were sent."""
    before = _get(url, "/metrics")
    command = [schemathesis, "run", f"{url}/openapi.json", "--checks", "no_fault", "--phases"]
    command += ["examples,coverage,fuzzing", "--max-examples", str(math.ceil(num_cases / NUM_BODIES))]
    command += ["--continue-on-failure", "--request-timeout", "120", "--suppress-health-check", "all"]
    command += ["--warnings", "off", "--no-color", *(() if seed is None else ("--seed", str(seed)))]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)}
    status = subprocess.run(command, env=environment, check=False).returncode
    _get(url, "/ready")
    after = _get(url, "/metrics")
    num_calls = int(
        total(after, "specray_ingress_calls_total") - total(before, "specray_ingress_calls_total")
    )
    print(f"{num_calls} calls")
    for code in sorted(set(re.findall(r'specray_ingress_calls_total\{[^}]*code="(\d+)"', after))):
        pattern = rf'^specray_ingress_calls_total\{{[^}}]*code="{code}"[^}}]*\}} (\S+)'
        print(f"  {code}: {int(sum(map(float, re.findall(pattern, after, re.MULTILINE))))}")
    if num_calls < num_cases:
        print(f"fewer than {num_cases} calls reached the service", file=sys.stderr)
        return 1
    losses = [name for name in LOSSES if total(after, name) > total(before, name)]
    if losses or not actors(before) or actors(after) != actors(before):
        print(f"an actor died: {losses}, {actors(before)} are {actors(after)} now", file=sys.stderr)
        return 1
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", required=True, help="its command")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument("--url", help="a running service with http.openapi; default: one is started")
    options = parser.parse_args()
    with contextlib.nullcontext(options.url) if options.url else served() as url:
        return fuzz(options.schemathesis, url, num_cases=options.cases, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
