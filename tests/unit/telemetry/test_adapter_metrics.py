"""Metrics of adapters: few labels, and what gateways read of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from specray.telemetry.adapters import AdapterMetrics
from specray.telemetry.exposition import registry_text, with_vllm_names


def test_labels_are_those_of_adapters_in_memory() -> None:
    registry = CollectorRegistry()
    metrics = AdapterMetrics(registry)
    metrics.observe("late", 1, 1, 1)
    metrics.keep(["sql", "chat"])
    metrics.observe("sql", 5, 4, 3)
    metrics.observe("chat", 1, 0, 0)
    metrics.keep(["sql"])
    metrics.observe("chat", 1, 0, 0)
    lines = [line for line in registry_text(registry).splitlines() if "_tokens_total{" in line]
    assert lines == [
        'specray_adapter_output_tokens_total{adapter="sql"} 5.0',
        'specray_adapter_draft_tokens_total{adapter="sql"} 4.0',
        'specray_adapter_accepted_tokens_total{adapter="sql"} 3.0',
    ]


def test_gateways_read_whose_requests_run_and_wait_and_since_when() -> None:
    registry, now = CollectorRegistry(), [7.0]
    metrics = AdapterMetrics(registry, now=lambda: now[0])
    metrics.show_requests(8, {"sql", "chat"}, ())
    now[0] = 9.0
    metrics.show_requests(8, {"chat", "sql"}, ())
    text = with_vllm_names(registry_text(registry), "tiny")
    sample = 'max_lora="8",running_lora_adapters="chat,sql",waiting_lora_adapters=""} 7.0'
    assert f'vllm:lora_requests_info{{model_name="tiny",engine="0",{sample}' in text
    metrics.show_requests(8, {"chat"}, {"sql"})
    (line,) = (
        each for each in registry_text(registry).splitlines() if each.startswith("specray_adapter_req")
    )
    assert line.endswith('running_lora_adapters="chat",waiting_lora_adapters="sql"} 9.0')
