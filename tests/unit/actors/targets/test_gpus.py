"""Ranks of a node see its GPUs and sit at their own; nobody sits at another's."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

import specray.serving.local.ranks as local
from specray.actors import workers
from specray.actors.targets.place import GpuPlace, RankProcess, check_own_gpus, gpu_places, place_among
from specray.config import parse_config
from specray.engine.group.parallel import GroupArgs
from specray.engine.runner import assembly
from specray.engine.runner.runner import ModelRunner
from specray.errors import ConfigError, EngineLostError
from tests.unit.actors.targets.fake_cuda import FakeCuda

CONFIG = parse_config({name: {"device": "cuda", "tensor_parallel_size": 2} for name in ("target", "draft")})


def test_ranks_that_were_given_one_gpu_are_refused() -> None:
    apart = [RankProcess("x", 1, ("0",)), RankProcess("x", 2, ("1",)), RankProcess("y", 3, ("0",))]
    check_own_gpus(apart, role="draft")
    check_own_gpus([RankProcess("x", 1), RankProcess("x", 2)], role="draft")
    with pytest.raises(ConfigError, match=r"draft\.ray_actor_options: num_gpus .* allowed: more than 0\.5"):
        check_own_gpus([*apart, RankProcess("x", 4, ("1",))], role="draft")


def test_ranks_of_a_node_see_its_gpus_in_their_own_order() -> None:
    ranks = [
        RankProcess("x", 1, ("6",)),
        RankProcess("x", 2, ("4",)),
        RankProcess("y", 3, ("0", "1")),
        RankProcess("z", 4, ("2",)),
        RankProcess("z", 5),
    ]
    assert gpu_places(ranks) == [
        GpuPlace(0, ("6", "4"), 0),
        GpuPlace(1, ("6", "4"), 1),
        GpuPlace(0, ("0",), 0),
        # One of this node's has none.
        None,
        None,
    ]


@pytest.mark.parametrize("ranks", [[RankProcess("x", 1, ("6",))], [RankProcess("x", 1), RankProcess("x", 2)]])
def test_single_ranks_and_those_without_gpus_stay_as_they_are(ranks: list[RankProcess]) -> None:
    assert gpu_places(ranks) == [None] * len(ranks)


def test_a_part_of_a_gpu_is_seen_alone() -> None:
    assert place_among(1, ("MIG-a", "MIG-b")) == GpuPlace(1, ("MIG-b",), 0)


class Seen:
    """What a rank was loaded with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
        self.args: GroupArgs | None = None
        self.claimed = ""
        self._cuda = cuda
        self.joined_at = self.followed_at = ""
        monkeypatch.setattr(workers.ParallelContext, "join", self.join)
        monkeypatch.setattr(assembly, "claim_gpu", self._claim)
        monkeypatch.setattr(assembly, "load_model", self._load)

    def join(self, args: GroupArgs, meeting: object) -> Any:
        self.args, self.joined_at = args, self._cuda.current
        return workers.ParallelContext(args, None, None)  # type: ignore[arg-type]

    def _claim(self, config: object, role: str, gpu: str) -> None:
        self.claimed = gpu

    def _load(self, args: object, *, dtype: object, device: object) -> None:
        self.device = str(device)
        raise EngineLostError("as far as this goes")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_rank_joins_loads_and_claims_at_its_own_gpu(role: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, 8)
    # As Ray shows it before.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    seen = Seen(monkeypatch, cuda)
    place = GpuPlace(1, ("6", "4"), 1)
    with pytest.raises(EngineLostError, match="as far as this goes"):
        workers.start_rank(CONFIG, role=role, rank=1, meeting="here", address="unix:/x", place=place)
    assert (os.environ["LOCAL_RANK"], cuda.shown) == ("1", ["6", "4"])
    assert seen.args is not None and (seen.args.device_type, seen.args.gpu_index) == ("cuda", 1)
    assert (seen.joined_at, seen.device, seen.claimed) == ("4", "cuda:1", "uuid-4")


def test_a_single_rank_sees_what_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    seen = Seen(monkeypatch, cuda)
    with pytest.raises(EngineLostError, match="as far as this goes"):
        workers.build_follower(CONFIG.target, role="target", parallel=None)  # type: ignore[arg-type]
    assert ("LOCAL_RANK" in os.environ, cuda.shown) == (False, ["4"])
    assert (seen.device, seen.claimed) == ("cuda:0", "uuid-4")


def test_the_thread_that_follows_is_at_the_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, 2)
    seen: list[str] = []

    class Group:
        rank = 1

        def receive_step(self) -> None:
            seen.append(cuda.current)

    runner = object.__new__(ModelRunner)
    runner._parallel = Group()  # type: ignore[assignment]
    runner.info = type("Info", (), {"device": assembly.choose_device(CONFIG.target, 1)})  # type: ignore[assignment]
    thread = threading.Thread(target=runner.follow)
    thread.start()
    thread.join(10)
    assert (seen, cuda.current) == (["1"], "0")


def test_a_gpu_that_is_not_shown_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"device is 'cuda', but GPU 2 of 0, 1 cannot be used: CUDA error"):
        workers.join_group(CONFIG, "target", 2, "here", GpuPlace(2, ("0", "1", "7"), 2))


def test_a_process_that_shows_other_gpus_already_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, 4)
    place = GpuPlace(0, ("2", "3"), 0)
    workers.take_place(place)
    assert cuda.current == "2"
    # A draft's replica loads another model in the same group.
    workers.take_place(place)
    with pytest.raises(EngineLostError, match=r"shows the GPUs '2,3', but its group now has '2,1'"):
        workers.take_place(GpuPlace(0, ("2", "1"), 0))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_ranks_without_ray_count_through_the_gpus_of_their_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2,7")
    seen = Seen(monkeypatch, cuda)
    monkeypatch.setattr(local, "apply_interface_environment", lambda interface: None)
    monkeypatch.setattr(workers.ParallelContext, "close", lambda self: None)
    with pytest.raises(EngineLostError, match="as far as this goes"):
        local.follow(CONFIG, "target", 1, "here")
    assert (cuda.shown, os.environ["LOCAL_RANK"]) == (["5", "2"], "1")
    assert (seen.joined_at, seen.claimed) == ("2", "uuid-2")


def test_a_leader_without_ray_takes_the_first_gpu_and_needs_one_for_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch, 2)
    local.take_first_gpu(CONFIG.target, "target")
    assert (os.environ["LOCAL_RANK"], cuda.current) == ("0", "0")
    larger = CONFIG.target.model_copy(update={"tensor_parallel_size": 3})
    with pytest.raises(ConfigError, match=r"target\.tensor_parallel_size is 3; allowed here: at most 2"):
        local.take_first_gpu(larger, "target")
