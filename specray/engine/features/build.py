"""Builds a target's drafter: its checkpoint before the target, its forward after it."""

from __future__ import annotations

from dataclasses import dataclass

from specray.config import TargetConfig
from specray.engine.features.base import FeatureStore, Placement, TargetShape
from specray.engine.features.block.layout import BlockLayout
from specray.engine.features.drafting import TargetDrafting
from specray.engine.features.loader import Layout, drafter_name, load_drafter, load_fuser, read_drafter
from specray.engine.features.parts import DraftHead, choose_operators, described_shape, target_parts
from specray.engine.features.remote.sending import FeatureSender
from specray.engine.features.tap import FeatureTap
from specray.engine.model.description import ModelArgs, describe
from specray.engine.runner.assembly import DTYPES, model_args
from specray.engine.runner.memory import DrafterMemory
from specray.engine.runner.runner import ModelRunner
from specray.engine.sampling.grammars import GrammarMasks

_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """A drafter whose checkpoint is read and fits the target, which is not loaded yet."""

    layout: Layout
    shape: TargetShape
    args: ModelArgs
    """Description of the target's checkpoint."""
    item_bytes: int
    """Bytes of a number of the target's data type."""
    max_model_len: int
    max_num_seqs: int
    """Sequences for which it drafts at once, at most."""
    head: DraftHead
    """What it draws through."""
    is_remote: bool = False
    """Whether the drafter runs in the draft's process, to which features are sent."""

    @property
    def name(self) -> str:
        return drafter_name(self.layout)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.layout.feature_layers

    @property
    def drafter_memory(self) -> DrafterMemory:
        """Memory that it will take."""
        layout, shape = self.layout, self.shape
        if self.is_remote:
            num_bytes = layout.num_fuser_weights * self.item_bytes
            return DrafterMemory(num_bytes, layout.feature_size * self.item_bytes)
        # A group's leader has a shard of the target's embedding and head, and reads both once more.
        num_again = 2 * shape.vocab_size * shape.hidden_size if self.args.tensor_parallel_size > 1 else 0
        num_bytes = (layout.num_weights + num_again) * self.item_bytes
        num_bytes += self.head.num_bytes(shape, self.item_bytes)
        step_bytes = layout.mask_bytes(self.max_model_len, self.item_bytes)
        if isinstance(layout, BlockLayout):
            step_bytes = layout.logit_bytes(self.max_num_seqs, shape.vocab_size)
        return DrafterMemory(num_bytes, layout.bytes_per_token(self.item_bytes), step_bytes)


def plan_drafter(config: TargetConfig, *, is_remote: bool = False) -> DrafterPlan | None:
    """Reads the target's drafter; None: it has none. ConfigError names what does not fit."""
    if config.drafter is None:
        return None
    args = model_args(config, "target", config.tensor_parallel_size)
    described = describe(args)
    shape = described_shape(described)
    layout = read_drafter(config.drafter, args, shape, DTYPES[config.dtype])
    item_bytes, longest = _ITEM_BYTES[config.dtype], described.max_model_len
    head = DraftHead.of(config, shape.vocab_size)
    return DrafterPlan(layout, shape, args, item_bytes, longest, config.max_num_seqs, head, is_remote)


def tap_features(
    runner: ModelRunner, plan: DrafterPlan, *, grammars: GrammarMasks, max_num_draft_probs: int
) -> tuple[FeatureTap, TargetDrafting]:
    """Loads the drafter next to the target that the runner runs.

    Returns:
        The runner that feeds it, to take the other's place, and what drafts.

    Raises:
        ConfigError: it cannot be loaded next to this target.
    """
    info = runner.info
    parts = target_parts(runner, plan.layout, plan.shape, plan.args, plan.head)
    drafter = load_drafter(plan.layout, parts)
    store = FeatureStore(
        parts.num_blocks, parts.block_size, drafter.feature_size, like=runner.cache.layers[0]
    )
    drafting = TargetDrafting(
        drafter,
        store,
        vocab_size=info.vocab_size,
        device=info.device,
        max_model_len=info.max_model_len,
        num_token_ids=info.num_token_ids,
        max_num_draft_probs=max_num_draft_probs,
        grammars=grammars,
    )
    return FeatureTap(runner, drafter, store, info.device), drafting


def send_features(runner: ModelRunner, plan: DrafterPlan) -> tuple[FeatureTap, FeatureSender]:
    """Loads the target's part of a remote drafter: the runner that stores features, and what sends them."""
    info = runner.info
    fuser = load_fuser(plan.layout, Placement(choose_operators(runner), info.dtype, info.device))
    cache = runner.cache
    store = FeatureStore(cache.num_blocks, info.block_size, fuser.feature_size, like=cache.layers[0])
    return FeatureTap(runner, fuser, store, info.device), FeatureSender(store)
