"""Two processes do not take one GPU by accident; they share it where both say so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specray.config import EngineConfig
from specray.engine.runner.gpu_claim import claim_gpu, warn_of_turns
from specray.errors import ConfigError
from tests.unit.engine.processes import hold_gpu, preloaded_context


@contextmanager
def another_process(directory: Path, num_gpus: float | None) -> Iterator[int]:
    """Has the GPU while the block runs."""
    context = preloaded_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=hold_gpu, args=(theirs, directory, num_gpus))
    process.start()
    try:
        assert ours.poll(60) and ours.recv() == "taken"
        assert process.pid is not None
        yield process.pid
    finally:
        ours.close()
        theirs.close()
        process.join(60)
    assert process.exitcode == 0


def engine(**options: float) -> EngineConfig:
    return EngineConfig(ray_actor_options=dict(options))


def test_a_gpu_that_another_process_has_is_refused_by_name_until_it_ends(tmp_path: Path) -> None:
    with another_process(tmp_path, None) as pid:
        for config, said in ((engine(), "not set"), (engine(num_gpus=0.5), "0.5")):
            with pytest.raises(ConfigError) as raised:
                claim_gpu(config, "target", "GPU-1", directory=tmp_path)
            assert str(raised.value) == (
                f"target.ray_actor_options: num_gpus is {said}, but GPU GPU-1 is taken by the draft of "
                f"process {pid}; allowed: another GPU, or num_gpus below 1 for every engine that shares it"
            )
        claim_gpu(engine(), "target", "GPU-2", directory=tmp_path)
    claim_gpu(engine(), "target", "GPU-1", directory=tmp_path)


def test_engines_that_say_so_share_a_gpu_and_others_do_not(tmp_path: Path) -> None:
    with another_process(tmp_path, 0.2):
        claim_gpu(engine(num_gpus=0.8), "target", "GPU-1", directory=tmp_path)
        with pytest.raises(ConfigError, match=r"num_gpus is 1\.0, but GPU GPU-1 is taken by the draft of"):
            claim_gpu(engine(num_gpus=1.0), "target", "GPU-1", directory=tmp_path)


def test_two_engines_of_one_process_are_no_accident(tmp_path: Path) -> None:
    claim_gpu(engine(), "target", "GPU-3", directory=tmp_path)
    claim_gpu(engine(), "draft", "GPU-3", directory=tmp_path)
    assert (tmp_path / "specray-gpu-GPU-3.lock").read_text().splitlines() == [
        f"the {role} of process {os.getpid()}" for role in ("target", "draft")
    ]


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    claim_gpu(engine(), "target", "GPU-1", directory=tmp_path / "missing")


def test_a_part_of_a_gpu_without_mps_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    for config in (engine(), engine(num_gpus=1.0), engine(num_gpus=0.0)):
        warn_of_turns(config, "draft")
    assert caplog.messages == []
    warn_of_turns(engine(num_gpus=0.25), "draft")
    [message] = caplog.messages
    assert message.startswith(
        f"draft.ray_actor_options: num_gpus is 0.25, but no MPS daemon is found in {tmp_path}: "
    )
    (tmp_path / "control").touch()
    warn_of_turns(engine(num_gpus=0.25), "draft")
    assert len(caplog.messages) == 1
