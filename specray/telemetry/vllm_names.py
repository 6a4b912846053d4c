"""Repeats metrics under vLLM's names, for gateways, autoscalers and benchmarks that read those."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from specray.telemetry.exposition import labelled

VLLM_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "specray_spec_decode_num_drafts_total": "vllm:spec_decode_num_drafts_total",
        "specray_spec_decode_num_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
        "specray_spec_decode_num_accepted_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
        "specray_spec_decode_num_accepted_tokens_per_pos_total": (
            "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        ),
        "specray_running_sessions": "vllm:num_requests_running",
        "specray_queue_depth": "vllm:num_requests_waiting",
        "specray_target_cache_usage_ratio": "vllm:kv_cache_usage_perc",
        "specray_preemptions_total": "vllm:num_preemptions_total",
        "specray_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
        "specray_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
        "specray_prompt_tokens_total": "vllm:prompt_tokens_total",
        "specray_output_tokens_total": "vllm:generation_tokens_total",
        "specray_requests_total": "vllm:request_success_total",
        "specray_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
        "specray_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    }
)
"""vLLM's name by ours, of families that mean the same."""
_OF_AN_ENGINE: Final = ("specray_prefix_cache_queries_total", "specray_prefix_cache_hits_total")
"""Families of which the target's samples are repeated; vLLM counts no draft here."""
_SAMPLE: Final = re.compile(r"([a-z_]+?)(_bucket|_sum|_count)?(?=[{ ])(.*)")
_TARGET: Final = re.compile(r'engine="target",?')


def with_vllm_names(text: str, model_name: str) -> str:
    """Returns Prometheus text with a copy of each family that vLLM has, too, and vLLM's labels on it."""
    lines = "".join(f"{line}\n" for line in _renamed(text))
    return text + labelled(lines, {"model_name": model_name, "engine": "0"})


def _renamed(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith("# "):
            mark, keyword, name, *rest = line.split(" ", 3)
            if name in VLLM_NAMES:
                yield " ".join((mark, keyword, VLLM_NAMES[name], *rest))
            continue
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name, suffix, rest_of_line = found[1], found[2] or "", found[3]
        if name not in VLLM_NAMES:
            continue
        if name in _OF_AN_ENGINE:
            if 'engine="target"' not in line:
                continue
            rest_of_line = _TARGET.sub("", rest_of_line).replace(",}", "}")
        yield VLLM_NAMES[name] + suffix + rest_of_line.replace("finish_reason=", "finished_reason=")
