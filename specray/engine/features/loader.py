"""One loader for drafters that read features: what a checkpoint is follows from its tensors, not its name."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from specray.config import MTP
from specray.engine.features.base import FeatureDrafter, Fuser, LastHidden, Placed, TargetParts, TargetShape
from specray.engine.features.block.drafter import BlockDrafter, BlockFuser
from specray.engine.features.block.layout import BlockLayout, is_block, read_block
from specray.engine.features.eagle.drafter import EagleDrafter, EagleFuser
from specray.engine.features.eagle.layout import EagleLayout, is_eagle, read_eagle
from specray.engine.features.files import DrafterFiles
from specray.engine.features.medusa import MedusaDrafter, MedusaLayout, is_medusa, read_medusa
from specray.engine.features.mtp.drafter import MtpDrafter
from specray.engine.features.mtp.in_turn import MtpInTurn
from specray.engine.features.mtp.layout import MtpLayout, read_mtp
from specray.engine.model.description import ModelArgs
from specray.errors import ConfigError

Layout = EagleLayout | MedusaLayout | BlockLayout | MtpLayout
"""A drafter's checkpoint, read and checked, before the target is loaded."""

_MAX_LISTED = 4

_log = logging.getLogger(__name__)


def read_layout(path: str, target: TargetShape) -> Layout:
    """Reads a drafter's checkpoint, whichever layout it has.

    Raises:
        ConfigError: it cannot be read, is of no known layout or does not fit the target; names the tensor or
            field, and what is allowed.
    """
    files = DrafterFiles(path)
    _warn_of_looser_acceptance(files)
    if is_block(files):
        return read_block(files, target)
    if is_eagle(files):
        return read_eagle(files, target)
    if is_medusa(files):
        return read_medusa(files, target)
    listed = ", ".join(sorted(files.tensors)[:_MAX_LISTED])
    raise ConfigError(
        f"drafter {path!r} has tensors of no layout that is known ({listed}, ...); "
        "allowed: EAGLE-1, 2, 3, P-EAGLE, Medusa, DFlash, DSpark"
    )


def _warn_of_looser_acceptance(files: DrafterFiles) -> None:
    section = files.config.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, dict) else None
    for each in [files.config, *(methods if isinstance(methods, list) else [])]:
        for field, exact in (("verifier_accept_k", 1), ("accept_tolerance", 0)):
            value = each.get(field) if isinstance(each, dict) else None
            if isinstance(value, int | float) and value > exact:
                _log.warning(
                    "drafter %r: %s is %r, which loosens acceptance; it is not applied, since outputs are "
                    "the target's alone",
                    files.path,
                    field,
                    value,
                )


def read_drafter(drafter: str, args: ModelArgs, target: TargetShape, dtype: torch.dtype) -> Layout:
    """Reads a checkpoint, or the MTP layer of the target's own ``args``. Raises ConfigError."""
    return read_mtp(args, target, dtype) if drafter == MTP else read_layout(drafter, target)


def drafter_name(layout: Layout) -> str:
    return MTP if isinstance(layout, MtpLayout) else Path(layout.path).name


def load_drafter(layout: Layout, parts: TargetParts) -> FeatureDrafter:
    """Makes the drafter of a checkpoint, on the target's device and in its data type."""
    if isinstance(layout, EagleLayout):
        return EagleDrafter(layout, parts)
    if isinstance(layout, BlockLayout):
        return BlockDrafter(layout, parts)
    if isinstance(layout, MtpLayout):
        return MtpDrafter(layout, parts) if layout.num_layers == 1 else MtpInTurn(layout, parts)
    return MedusaDrafter(layout, parts)


def load_fuser(layout: Layout, parts: Placed) -> Fuser:
    """The part of a drafter that the target's process holds where the drafter runs in another."""
    if isinstance(layout, EagleLayout):
        return EagleFuser(layout, parts)
    if isinstance(layout, BlockLayout):
        return BlockFuser(layout, parts)
    return LastHidden(layout, parts)
