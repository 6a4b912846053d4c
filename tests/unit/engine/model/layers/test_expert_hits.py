"""Counts of distinct experts: of each forward, over all layers, and told with a step of the target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specray.draft_tokens import DraftTokens
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.layers.experts.hits import ExpertHits, count_hits
from specray.engine.model.layers.experts.layer import ExpertLayer
from specray.engine.target.engine import TargetEngine
from specray.engine_info import RoutedExperts
from specray.types import SamplingParams, VerifyItem
from tests.unit.engine.model.checkpoints import write_checkpoint
from tests.unit.engine.runners import cpu_runner, info_of

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> DecoderForward:
    """Three layers, of which two have eight experts, two for a row."""
    path = tmp_path_factory.mktemp("mixture")
    changes = {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0], "decoder_sparse_step": 1}
    forward = cpu_runner(write_checkpoint(path, "qwen3_moe", **changes)).forward
    assert isinstance(forward, DecoderForward)
    return forward


def hits_of(forward: DecoderForward) -> ExpertHits:
    assert forward.expert_hits is not None
    return forward.expert_hits


def test_a_forward_counts_the_experts_that_its_rows_chose(forward: DecoderForward) -> None:
    first, second = (layer.gate for layer in forward.layers[1:])
    assert isinstance(first, ExpertLayer) and isinstance(second, ExpertLayer)
    hits = hits_of(forward)
    assert hits.info == RoutedExperts(16, 4)
    for num_rows in (1, 2, 7):
        rows = torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(num_rows))
        chosen = second.router(rows)[0]
        first(rows[:1])
        second(rows)
        hits.send()
        assert hits.read() == 2 + len(set(chosen.flatten().tolist()))


def test_a_target_tells_them_of_a_step_of_one_forward_alone(tmp_path: Path) -> None:
    runner = cpu_runner(write_checkpoint(tmp_path, "mixtral"), max_num_batched_tokens=16)
    assert isinstance(runner.forward, DecoderForward)
    hits = hits_of(runner.forward)
    assert hits.info == RoutedExperts(8, 4)
    target = TargetEngine(
        runner, info_of(runner, max_num_batched_tokens=16), device=torch.device("cpu"), expert_hits=hits
    )
    prompt = tuple(range(2, 14))
    target.verify([VerifyItem("a", 1, 0, prompt, sampling=GREEDY)])
    one = target.verify([VerifyItem("a", 2, len(prompt), (5,))])
    assert one.num_experts == 4
    more = target.verify([VerifyItem("a", 3, len(prompt), (5,), DraftTokens((6, 7, 8, 9, 20, 30)))])
    assert more.num_experts is not None and 4 < more.num_experts <= 8
    # Two forwards.
    assert target.verify([VerifyItem("b", 1, 0, tuple(range(2, 24)), sampling=GREEDY)]).num_experts is None
    assert target.verify([]).num_experts is None


def test_experts_that_compute_nothing_are_not_counted(tmp_path: Path) -> None:
    """Two layers of five experts, three of eight for a row, of which three give back their input."""
    runner = cpu_runner(write_checkpoint(tmp_path, "longcat_flash"))
    assert isinstance(runner.forward, DecoderForward)
    assert hits_of(runner.forward).info == RoutedExperts(10, 2)


def test_a_target_without_experts_tells_of_none(tmp_path: Path) -> None:
    runner = cpu_runner(write_checkpoint(tmp_path, "llama"))
    assert isinstance(runner.forward, DecoderForward) and runner.forward.expert_hits is None
    target = TargetEngine(runner, info_of(runner), device=torch.device("cpu"))
    assert target.verify([VerifyItem("a", 1, 0, (5, 6), sampling=GREEDY)]).num_experts is None


def test_where_all_are_chosen_there_is_nothing_to_count(tmp_path: Path) -> None:
    runner = cpu_runner(write_checkpoint(tmp_path, "mixtral", num_experts_per_tok=4))
    assert isinstance(runner.forward, DecoderForward) and runner.forward.expert_hits is None
    assert count_hits((), None, torch.device("cpu")) == ((), None)
