"""vLLM on the CPU, from a virtual environment of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specray.bench.compare.peers.base import BFLOAT16, PLAIN, Launch, PeerArm, Setup
from specray.bench.compare.peers.process import LOOPBACK


class Vllm:
    """vLLM: draft is greedy; draft-probabilistic samples it, for rejection at temperature > 0.

    Args:
        python: interpreter of the environment that has vLLM; None: not installed.
    """

    name = "vllm"
    modes = (PLAIN, "draft", "draft-probabilistic", "ngram")
    weights = (BFLOAT16,)
    max_concurrency = None

    def __init__(self, python: Path | None) -> None:
        self._python = python

    def absence(self) -> str | None:
        if self._python is None:
            return "--vllm-python is not given"
        if not self._python.is_file():
            return f"--vllm-python {self._python}: there is no such file"
        return None

    def prepare(self, setup: Setup, arms: Sequence[PeerArm]) -> None:
        """Does nothing."""

    def launch(self, arm: PeerArm, setup: Setup, port: int) -> Launch:
        command = [str(self._python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(setup.target), "--dtype", "bfloat16"]
        command += ["--host", LOOPBACK, "--port", str(port)]
        command += ["--max-model-len", str(setup.max_model_len), "--max-num-seqs", str(setup.max_num_seqs)]
        # Otherwise the checkpoint's sampling defaults would override the request's.
        command += ["--generation-config", "vllm"]
        if arm.mode != PLAIN:
            command += ["--speculative-config", json.dumps(_speculation(arm, setup))]
            command += ["--per-request-spec-decode-metrics", "summary"]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.num_threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return Launch(tuple(command), f"http://{LOOPBACK}:{port}", "/health", environment)

    def request_fields(self, temperature: float) -> dict[str, Any]:
        return {"top_p": 1.0, "top_k": 0}


def _speculation(arm: PeerArm, setup: Setup) -> dict[str, object]:
    if arm.mode == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": arm.k,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    config = {"method": "draft_model", "model": str(setup.draft), "num_speculative_tokens": arm.k}
    return config | ({"draft_sample_method": "probabilistic"} if arm.mode == "draft-probabilistic" else {})
