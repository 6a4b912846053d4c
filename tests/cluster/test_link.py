"""Tests of a pair on two hosts with a slow cable, as `specray bench overlap --link namespaces` measures
it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specray.bench.overlap.link import bytes_of
from specray.bench.testbed.netns import impairment_obstacles, obstacles

LACKING = (*obstacles(), *([] if obstacles() else impairment_obstacles()))
DELAY_MS = 40.0
TIMEOUT_S = 240
NUM_TOKENS = 24

ZEROS = "0 0 0 0 0 0"
DEVICES = f"""\
Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop and four more|bytes packets errs drop and four more
    lo: 1000 10 {ZEROS} 1000 10 {ZEROS}
  eth0: 1200 12 {ZEROS} 30034 56 {ZEROS}
 eth01: 7 1 {ZEROS} 7 1 {ZEROS}
"""


def test_bytes_of_a_device_are_those_received_and_sent() -> None:
    assert bytes_of(DEVICES, "eth0") == 31_234


@pytest.mark.skipif(bool(LACKING), reason=f"this machine lacks {', '.join(LACKING)}")
def test_serial_rounds_wait_for_a_slow_cable_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = (sys.executable, "-m", "specray.cli", "bench", "overlap", "--link", "namespaces")
    arms = ("--arm", "serial:2", "--num-prompts", "1", "--num-repeats", "1", f"--max-tokens={NUM_TOKENS}")
    delays = ("--delay-ms", "0", "--delay-ms", f"{DELAY_MS:g}")
    # Rounds of which none is a fallback's, which would not cross the cable.
    settings = (
        "--set",
        "speculation.fallback=none",
        "--set",
        "target.profile_s=0",
        "--set",
        "draft.profile_s=0",
    )
    done = subprocess.run(
        (*command, *arms, *delays, *settings, "--json", str(path)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    near, far = json.loads(path.read_text())
    assert (near["delay_ms"], far["delay_ms"]) == (0, DELAY_MS)
    assert near["tokens_per_round"] == far["tokens_per_round"] > 1
    assert far["idle_ms"] >= 2 * DELAY_MS
    for result in (near, far):
        # More than the headers of the frames that carry a proposal and what it answers.
        assert 200 < result["bytes_per_round"] < 4096
    assert not list(Path("/run/netns").glob("specray-*-router"))
