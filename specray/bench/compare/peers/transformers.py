"""generate() of transformers, behind a small server: one request at a time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from specray.bench.compare.peers.base import BFLOAT16, PLAIN, Launch, PeerArm, Setup
from specray.bench.compare.peers.process import LOOPBACK


class Transformers:
    """transformers: draft is ``assistant_model``, ngram is ``prompt_lookup_num_tokens``, without batches."""

    name = "transformers"
    modes = (PLAIN, "draft", "ngram")
    weights = (BFLOAT16,)
    max_concurrency = 1

    def absence(self) -> str | None:
        return None

    def prepare(self, setup: Setup, arms: Sequence[PeerArm]) -> None:
        """Does nothing."""

    def launch(self, arm: PeerArm, setup: Setup, port: int) -> Launch:
        command = [sys.executable, "-m", "specray.bench.compare.peers.generate_server"]
        command += ["--target", str(setup.target), "--port", str(port)]
        command += ["--num-threads", str(setup.num_threads)]
        if arm.mode == "draft":
            command += ["--draft", str(setup.draft), "--num-speculative-tokens", str(arm.k)]
        elif arm.mode == "ngram":
            command += ["--prompt-lookup", str(arm.k)]
        return Launch(tuple(command), f"http://{LOOPBACK}:{port}", "/health", {})

    def request_fields(self, temperature: float) -> dict[str, Any]:
        return {}
