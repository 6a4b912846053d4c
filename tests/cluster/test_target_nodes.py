"""Tests of tensor-parallel groups over the nodes of a Ray cluster: placement, order, and the loss of a
node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from specray.actors.targets.group import PlacedRanks, TargetGroup
from specray.actors.targets.place import GpuPlace
from specray.actors.targets.placement import GroupPlacement, place_group, ray_nodes
from specray.actors.targets.ranks import TargetRank
from specray.actors.targets.source import TargetSource
from specray.config import Config, parse_config
from specray.errors import ConfigError
from specray.requests import GenerateRequest
from specray.router import Router
from specray.rpc.connection import GrpcVerifier
from specray.serving.own_ray.nodes import lean_head, one_agent
from specray.types import SamplingParams

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

VOCAB_SIZE = 96
PROMPT = (5, 7, 9, 11, 13, 2, 4, 60, 33)
NUM_TOKENS = 48
ROUTER_CPUS = 0.1
ON_RANK_NODES = {"ranks": "yes"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four key-value heads: one for each of up to four ranks."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=48, max_position_embeddings=1024, bos_token_id=0,
        eos_token_id=1, pad_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    vocab = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        path
    )
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[int, ...]:
    """Returns the output of the library alone."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    output = reference.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    return tuple(output[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without room for ranks, a node for two of them, and another."""
    with one_agent(), lean_head(log_to_driver=False):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        with one_agent(), lean_head(log_to_driver=False):
            for _ in range(2):
                # Ray shares out what it is told of, whether or not there are GPUs.
                cluster.add_node(num_cpus=3, num_gpus=2, labels=ON_RANK_NODES)
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def config_of(model: Path, size: int, **target: Any) -> Config:
    options = {"num_cpus": 1.4, "label_selector": ON_RANK_NODES}
    return parse_config(
        {
            "target": {
                "model": str(model),
                "dtype": "float32",
                "device": "cpu",
                "num_threads": 1,
                "profile_s": 0,
                "tensor_parallel_size": size,
                "ray_actor_options": options,
                **target,
            },
            "draft": {"enabled": False},
            "speculation": {"num_speculative_tokens": 0, "fallback": "none"},
            "router": {"start_timeout_s": 120, "verify_timeout_s": 20},
        }
    )


def place(config: Config) -> GroupPlacement:
    return place_group(config.target, router_cpus=ROUTER_CPUS, nodes=ray_nodes())


class Site:
    """A router in this process, in front of a group in a placement group of its own."""

    def __init__(self, config: Config) -> None:
        placed = place(config)
        self.strategy = placed.strategy
        self.placement_group: PlacementGroup = placement_group(
            placed.bundles, strategy=placed.strategy, bundle_label_selector=placed.label_selectors
        )
        self.groups: list[TargetGroup] = []
        self.source = TargetSource(lambda: self._make(config), self._connect)
        self.router = Router(self.source.connect, None, router=config.router, speculation=config.speculation)

    def _make(self, config: Config) -> TargetGroup:
        self.groups.append(TargetGroup(config, self.placement_group))
        return self.groups[-1]

    async def _connect(self, address: str) -> GrpcVerifier:
        return await GrpcVerifier.connect(address, timeout_s=20)

    async def rank_nodes(self) -> list[str]:
        """Returns the node of each rank."""
        return [rank.node_id for rank in await self.groups[-1].processes()]

    async def tokens(self, request_id: str) -> AsyncIterator[int]:
        request = GenerateRequest(
            request_id, PROMPT, SamplingParams(temperature=0.0, num_prompt_tokens=len(PROMPT)), NUM_TOKENS
        )
        async for chunk in self.router.stream(request):
            for token in chunk.token_ids:
                yield token


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Site]:
    site = Site(config)
    try:
        await site.router.start()
        yield site
    finally:
        await site.router.stop()
        site.source.stop()
        remove_placement_group(site.placement_group)


async def test_a_group_that_fits_a_node_stays_there(
    cluster: Cluster, model: Path, expected: tuple[int, ...]
) -> None:
    async with running(config_of(model, 2)) as site:
        assert site.strategy == "STRICT_PACK"
        assert len(set(await site.rank_nodes())) == 1
        assert tuple([token async for token in site.tokens("a")]) == expected


async def test_four_ranks_of_two_nodes_stand_by_node_and_give_the_tokens_of_one(
    cluster: Cluster, model: Path, expected: tuple[int, ...]
) -> None:
    async with running(config_of(model, 4, forward="auto")) as site:
        assert site.strategy == "PACK"
        nodes = await site.rank_nodes()
        assert len(set(nodes)) == 2
        assert nodes == [nodes[0]] * 2 + [nodes[2]] * 2
        assert tuple([token async for token in site.tokens("a")]) == expected


async def test_ranks_of_a_node_see_its_gpus_for_as_long_as_they_live(cluster: Cluster, model: Path) -> None:
    class Rank(TargetRank):
        """Takes its place, loads nothing, and says afterwards what CUDA would be shown."""

        def start(self, meeting: str | None, place: GpuPlace | None = None) -> str | None:
            from specray.actors.workers import take_place

            self.place = place
            take_place(place)
            return os.environ["CUDA_VISIBLE_DEVICES"]

        def wait(self) -> str:
            assert self.place is not None
            listed, own = os.environ["CUDA_VISIBLE_DEVICES"], ray.get_gpu_ids()
            assert listed.split(",")[self.place.gpu_index] == str(own[0])
            return f"{listed} {os.environ['LOCAL_RANK']}"

    options = {"num_cpus": 1.4, "num_gpus": 1, "label_selector": ON_RANK_NODES}
    config = config_of(model, 4, ray_actor_options=options)
    placed = place(config)
    group = placement_group(
        placed.bundles, strategy=placed.strategy, bundle_label_selector=placed.label_selectors
    )
    ranks = PlacedRanks(config, Rank, group)
    try:
        await ranks.place(4)
        shown = [str(listed) for listed in await ranks.start("unused")]
        assert [set(listed.split(",")) for listed in shown] == [{"0", "1"}] * 4
        assert (shown[0], shown[2]) == (shown[1], shown[3])
        # Ray leaves the environment of an actor alone behind its first call.
        after = [await actor.wait.remote() for actor in ranks.actors]
        assert after == [f"{listed} {place}" for listed, place in zip(shown, (0, 1, 0, 1), strict=True)]
    finally:
        ranks.stop()
        remove_placement_group(group)


async def test_a_group_that_cannot_start_says_why_and_leaves_nobody_behind(
    cluster: Cluster, tmp_path: Path
) -> None:
    site = Site(config_of(tmp_path, 2))
    try:
        with pytest.raises(ConfigError, match=str(tmp_path)):
            await site.router.start()
        # Ray ends actors asynchronously.
        with pytest.raises(ray.exceptions.RayActorError):
            async with asyncio.timeout(30.0):
                while True:
                    await site.rank_nodes()
                    await asyncio.sleep(0.1)
    finally:
        remove_placement_group(site.placement_group)


async def test_a_removed_node_is_a_pause_when_another_takes_its_rank(
    cluster: Cluster, model: Path, expected: tuple[int, ...]
) -> None:
    # A rank that leaves no room for another on its node, and a third node for the one that is lost.
    options = {"num_cpus": 2, "label_selector": ON_RANK_NODES}
    with one_agent(), lean_head(log_to_driver=False):
        nodes = [*cluster.worker_nodes, cluster.add_node(num_cpus=3, labels=ON_RANK_NODES)]
    cluster.wait_for_nodes()
    async with running(config_of(model, 2, ray_actor_options=options)) as site:
        assert site.strategy == "PACK"
        leader_node, follower_node = before = await site.rank_nodes()
        assert leader_node != follower_node
        output: list[int] = []
        async for token in site.tokens("a"):
            output.append(token)
            if len(output) == 8:
                (lost,) = [node for node in nodes if node.node_id == follower_node]
                await asyncio.to_thread(cluster.remove_node, lost)
        assert tuple(output) == expected
        after = await site.rank_nodes()
        assert len(set(after)) == 2 and follower_node not in after and leader_node in after
        assert (len(site.groups), before != after) == (2, True)
