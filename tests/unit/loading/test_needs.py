"""What a model takes, by its files and settings, before it is loaded."""

from __future__ import annotations

from pathlib import Path

from specray.config import Config
from specray.loading.needs import needs_of
from tests.unit.engine.adapters.files import write_adapter
from tests.unit.engine.model.checkpoints import write_checkpoint


def test_room_for_adapters_counts(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "llama")
    own = write_adapter(tmp_path / "adapters" / "x", base).folder / "adapter_model.safetensors"

    def needed(**values: object) -> float:
        target = {"model": str(base), "dtype": "float32", "device": "cpu"}
        config = Config.model_validate({"target": {**target, **values.pop("target", {})}, **values})  # type: ignore[dict-item]
        return needs_of(config).memory_bytes

    without = needed(draft={"enabled": False})
    adapters = {"directory": str(tmp_path / "adapters"), "max_loaded": 6, "max_rank": 3}
    counted = needed(target={"adapters": adapters}, draft={"enabled": False}) - without
    # All projections have the rank of the file here, whose header is no number.
    assert 0 <= 6 * own.stat().st_size - counted < 6 * 8192
    draft = {"model": str(base), "adapters": {"x": str(own.parent)}}
    assert needed(draft=draft) - needed(draft={"model": str(base)}) == own.stat().st_size
