"""Tests of the parts of a test bed that need neither Ray nor root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.bench.soak.memory import anonymous_bytes, process_name
from specray.bench.testbed import beds
from specray.bench.testbed.control import answer
from specray.bench.testbed.models import draft_path, make_other_model
from specray.bench.testbed.parts import Part, PartRole, living_parts, of_role, role_of
from specray.bench.testbed.tree import adopting, descendants, reap_orphans
from specray.bench.testbed.wire import Cable, Impairment
from specray.config import parse_config
from specray.errors import EngineLostError

GRANDCHILD = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {code!r}], stdout=subprocess.DEVNULL).pid)
"""
SLEEPER = "import time; time.sleep(60)"


def orphaned() -> int:
    command = [sys.executable, "-c", GRANDCHILD.format(code=SLEEPER)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def actor(class_name: str, pid: int, started: int, state: str = "ALIVE", name: str = "") -> dict[str, Any]:
    return {
        "ActorClassName": class_name, "State": state, "Pid": pid, "StartTime": started,
        "Address": {"NodeID": "n"}, "Name": name,
    }  # fmt: skip


def test_parts_are_living_actors_of_known_classes_oldest_first() -> None:
    actors = {
        "a": actor("ServeReplica:specray:Draft", 12, 30, name="SERVE_REPLICA::specray#Draft#x7"),
        "b": actor("TargetRank", 11, 20, name="ranks#0"),
        "c": actor("ServeReplica:specray:Draft", 10, 10, "DEAD"),
        "d": actor("ServeController", 9, 1),
        "e": actor("ServeReplica:specray:Router", 8, 15),
    }
    parts = living_parts(actors)
    assert [(part.role, part.pid) for part in parts] == [
        ("controller", 9), ("router", 8), ("target", 11), ("draft", 12)
    ]  # fmt: skip
    assert of_role(parts, PartRole.DRAFT) == (Part(PartRole.DRAFT, "a", 12, "n", "x7"),)
    assert of_role(parts, PartRole.TARGET) == (Part(PartRole.TARGET, "b", 11, "n", ""),)
    assert [Part.from_json(json.loads(json.dumps(asdict(part)))) for part in parts] == list(parts)
    assert role_of("ServeReplica:other:Ingress") is PartRole.INGRESS and role_of("ProxyActor") is None


def test_control_answers_each_line_and_survives_a_failure() -> None:
    def fail() -> None:
        raise ValueError("no such node")

    written: list[str] = []
    names = enumerate(("parts", "fail", "parts"), 1)
    lines = iter([json.dumps({"id": number, "op": name}) + "\n" for number, name in names])
    answer({"parts": lambda: [1], "fail": fail}, lines, written.append)
    assert [json.loads(text) for text in written] == [
        {"id": 1, "value": [1]}, {"id": 2, "error": "ValueError: no such node"}, {"id": 3, "value": [1]}
    ]  # fmt: skip


def test_another_draft_is_made_once_with_other_weights_and_the_same_files(tmp_path: Path) -> None:
    (source := tmp_path / "draft").mkdir()
    weights = {"norm": torch.ones(4), "up": torch.randn(8, 4, generator=torch.Generator().manual_seed(0))}
    weights["up"] = weights["up"].to(torch.bfloat16)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text("{}")
    other = make_other_model(source, tmp_path / "other")
    changed = load_file(other / "model.safetensors")
    assert (other / "config.json").read_text() == "{}"
    assert changed["up"].dtype == torch.bfloat16 and not torch.equal(changed["up"], weights["up"])
    # In proportion to a weight's spread: constants stay.
    assert torch.equal(changed["norm"], weights["norm"])
    assert (changed["up"].float() - weights["up"].float()).std() < 0.04 * weights["up"].float().std()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "other"]
    (source / "model.safetensors").unlink()
    assert make_other_model(source, other) == other
    with pytest.raises(EngineLostError, match="no other model could be made from"):
        make_other_model(tmp_path / "none", tmp_path / "third")


def test_a_draft_in_no_directory_has_no_other() -> None:
    assert draft_path(parse_config({}).draft).is_dir()
    with pytest.raises(EngineLostError, match="draft some/hub-id is no directory"):
        draft_path(parse_config({"draft": {"model": "some/hub-id"}}).draft)


def test_sound_cable_passes_frames_at_once_to_the_other_end_in_order() -> None:
    cable = Cable()
    cable.send(0, b"a", 1.0)
    cable.send(1, b"b", 1.0)
    cable.send(0, b"c", 1.0)
    assert cable.due(1.0) == [(1, b"a"), (0, b"b"), (1, b"c")]
    assert cable.next_due_s() is None


def test_slow_cable_holds_each_frame_for_its_delay() -> None:
    cable = Cable()
    cable.impairment = Impairment(delay_ms=250)
    cable.send(0, b"a", 1.0)
    cable.send(0, b"b", 1.125)
    assert (cable.due(1.2), cable.next_due_s()) == ([], 1.25)
    assert cable.due(1.25) == [(1, b"a")]
    assert cable.due(2.0) == [(1, b"b")]


def test_lossy_cable_loses_its_share_and_the_same_frames_for_a_seed() -> None:
    def passed(seed: int, loss: float) -> list[bytes]:
        cable = Cable(seed)
        cable.impairment = Impairment(loss=loss)
        for number in range(200):
            cable.send(0, bytes([number]), 0.0)
        return [frame for _, frame in cable.due(0.0)]

    assert passed(1, 0.1) == passed(1, 0.1) != passed(2, 0.1)
    assert 160 <= len(passed(1, 0.1)) <= 195
    assert (len(passed(1, 0.0)), len(passed(1, 1.0))) == (200, 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and subreapers are Linux's")
def test_orphans_of_the_block_are_found_and_ended_and_others_spared() -> None:
    other = subprocess.Popen([sys.executable, "-c", SLEEPER])
    try:
        with adopting():
            orphan = orphaned()
            assert {orphan, other.pid} <= set(descendants(os.getpid()))
            os.kill(orphan, signal.SIGKILL)
            os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
            reap_orphans()
            assert orphan not in descendants(os.getpid())
            orphan = orphaned()
        assert orphan not in descendants(os.getpid())
        assert anonymous_bytes(orphan) is None
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_processes_are_called_by_role_or_by_what_they_run() -> None:
    process = subprocess.Popen([sys.executable, "-u", "-c", SLEEPER])
    try:
        assert process_name(process.pid, {process.pid: "draft"}) == "draft"
        assert anonymous_bytes(os.getpid())
        assert process_name(os.getpid(), {}) != "?"
    finally:
        process.kill()
        process.wait()
    assert process_name(process.pid, {}) == "?"


@pytest.mark.parametrize("listen", ["loopback", "node"])
def test_the_configuration_of_a_bed_is_one_that_can_be_read(listen: str) -> None:
    placed = beds.with_ports(beds.with_placement(parse_config({}), listen=listen), "10.234.0.1", 8000, 9000)
    read = parse_config(placed.model_dump(mode="json"))
    assert (read.rpc.listen, read.http.host, read.grpc.port) == (listen, "10.234.0.1", 9000)
    assert read.draft.ray_actor_options == {"resources": {"specray_draft_node": 0.001}}
