"""Which drafters run in the draft's process: those that go on with their own output behind fused features."""

from __future__ import annotations

from specray.engine.features.base import TargetShape
from specray.engine.features.block.layout import BlockLayout
from specray.engine.features.eagle_layout import EagleLayout
from specray.engine.features.loader import read_layout
from specray.errors import ConfigError


def read_remote(path: str, target: TargetShape) -> EagleLayout:
    """Reads a checkpoint of the EAGLE family.

    Raises:
        ConfigError: as ``read_layout``, or it is of another kind, which is named.
    """
    layout = read_layout(path, target)
    if isinstance(layout, EagleLayout):
        return layout
    kind = "a DFlash or DSpark drafter" if isinstance(layout, BlockLayout) else "a Medusa drafter"
    raise ConfigError(
        f"target.drafter {path!r} is {kind} and draft.model is 'remote-features'; allowed there: EAGLE-1, 2, "
        "3, P-EAGLE (with draft.model 'features' it drafts in the target)"
    )
