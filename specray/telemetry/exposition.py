"""Prometheus text: of a registry, of many processes merged, and with copies under vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest


def registry_text(registry: CollectorRegistry) -> str:
    """Returns all metrics in Prometheus text format.

    ``prometheus_client`` adds a gauge with its creation time to each of its own counters and histograms: a
    third of all series, which nobody uses.
    """
    lines = generate_latest(registry).decode().splitlines()
    return "".join(f"{line}\n" for line in lines if not _family(line).endswith("_created"))


def _family(line: str) -> str:
    if line.startswith("# "):
        return line.split(" ", 3)[2]
    return line.partition("{")[0].partition(" ")[0]


def labelled(text: str, labels: Mapping[str, str]) -> str:
    """Adds ``labels`` before each sample's own labels, which must have other names."""
    added = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "".join(f"{_with_labels(line, added)}\n" for line in text.splitlines()) if added else text


def merged(texts: Iterable[str]) -> str:
    """Merges texts so that every metric family occurs once, followed by all its samples.

    Families keep the order in which they are first seen. Equal samples of two texts must differ in their
    labels.
    """
    families: dict[str, tuple[dict[str, str], list[str]]] = {}
    for text in texts:
        header, samples = families.setdefault("", ({}, []))
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, keyword, name, *_ = line.split(" ", 3)
                header, samples = families.setdefault(name, ({}, []))
                # Two versions of specray may word the help differently; a scraper accepts only one.
                header.setdefault(keyword, line)
            elif line and not line.startswith("#"):
                samples.append(line)
    lines = (line for header, samples in families.values() for line in (*header.values(), *samples))
    return "".join(f"{line}\n" for line in lines)


def _with_labels(line: str, added: str) -> str:
    if not line or line.startswith("#"):
        return line
    # A name ends at the first brace or space.
    name, brace, rest = line.partition("{")
    if brace and " " not in name:
        separator = "" if rest.startswith("}") else ","
        return f"{name}{{{added}{separator}{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{added}}} {value}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


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
        "specray_target_cache_info": "vllm:cache_config_info",
        "specray_adapter_requests_info": "vllm:lora_requests_info",
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
_LABELS: Final = (("finish_reason=", "finished_reason="), ("num_blocks=", "num_gpu_blocks="))
"""Labels of ours, and vLLM's."""
_OF_AN_ENGINE: Final = ("specray_prefix_cache_queries_total", "specray_prefix_cache_hits_total")
"""Families of which the target's samples are repeated; vLLM counts no draft here."""
_SAMPLE: Final = re.compile(r"([a-z_]+?)(_bucket|_sum|_count)?(?=[{ ])(.*)")


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
            rest_of_line = re.sub(r'engine="target",?', "", rest_of_line).replace(",}", "}")
        for label, theirs in _LABELS:
            rest_of_line = rest_of_line.replace(label, theirs)
        yield VLLM_NAMES[name] + suffix + rest_of_line
