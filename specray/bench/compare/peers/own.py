"""specray itself, started with its command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from specray.bench.compare.peers.base import BFLOAT16, GGUF, PLAIN, Launch, PeerArm, Setup, stored_file
from specray.bench.compare.peers.process import LOOPBACK
from specray.errors import ConfigError

_OVERLAPS = {"serial": "serial", "auto": "auto", "ahead": "ahead", "enumerate": "enumerate"}
_MODEL_FREE = ("ngram", "suffix")
_QUANTIZED = ("int8", "int4")


class Specray:
    """specray: serial, auto, ahead and enumerate overlap; ngram and suffix draft without a model."""

    name = "specray"
    modes = (PLAIN, *_OVERLAPS, *_MODEL_FREE)
    weights = (BFLOAT16, GGUF, *_QUANTIZED)
    max_concurrency = None

    def absence(self) -> str | None:
        return None

    def prepare(self, setup: Setup, arms: Sequence[PeerArm]) -> None:
        """Raises ConfigError where an arm asks for a GGUF file that is not there."""
        for arm in arms:
            if arm.weights == GGUF and stored_file(setup.target) is None:
                raise ConfigError(f"--arm {arm.name}: --target {setup.target} has no GGUF file")

    def launch(self, arm: PeerArm, setup: Setup, port: int) -> Launch:
        options = {
            "--target": str(setup.target),
            "--draft": _draft(arm, setup),
            "--dtype": "bfloat16",
            "--max-model-len": str(setup.max_model_len),
            "--port": str(port),
            "--grpc-port": "0",
        }
        if arm.mode in _OVERLAPS:
            options["--overlap"] = _OVERLAPS[arm.mode]
        if arm.num_speculative_tokens is not None:
            options["--num-speculative-tokens"] = str(arm.num_speculative_tokens)
        settings: dict[str, object] = {
            "target.num_threads": setup.num_threads,
            "target.max_num_seqs": setup.max_num_seqs,
            "draft.max_num_seqs": setup.max_num_seqs,
        }
        if arm.weights in _QUANTIZED:
            settings["target.quantization"] = arm.weights
        if arm.weights != GGUF:
            models = {"target": setup.target} | ({"draft": setup.draft} if arm.mode in _OVERLAPS else {})
            settings |= {f"{name}.weights": BFLOAT16 for name, path in models.items() if stored_file(path)}
        command = [sys.executable, "-m", "specray.cli", "serve"]
        command += [part for option in options.items() for part in option]
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        return Launch(tuple(command), f"http://{LOOPBACK}:{port}", "/ready", {})

    def request_fields(self, temperature: float) -> dict[str, Any]:
        return {"return_speculation_metrics": True}


def _draft(arm: PeerArm, setup: Setup) -> str:
    if arm.mode == PLAIN:
        return "none"
    return arm.mode if arm.mode in _MODEL_FREE else str(setup.draft)
