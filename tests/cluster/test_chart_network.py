"""Who reaches what in the chart: the gRPC service, scraped ports, and the network policy."""

from __future__ import annotations

import pytest

from tests.cluster.chart_harness import BIG, IMAGE, KEY, RAY_SERVICE, Renderer, merged, pod_specs


def test_without_grpc_groups_need_not_say_where_the_ingress_is(helm: Renderer) -> None:
    groups = [{"name": name, "replicas": 2, "resources": {}} for name in "ab"]
    objects = helm.objects(merged(IMAGE, {"workerGroups": groups, "config": {"grpc": {"port": 0}}}))
    assert [name for kind, name in objects if kind == "Service"] == []
    policy = objects["NetworkPolicy", "demo-specray"]
    assert [port["port"] for port in policy["spec"]["ingress"][2]["ports"]] == [8000]


def test_grpc_goes_to_the_group_of_the_ingress(helm: Renderer) -> None:
    service = helm.objects(BIG)["Service", "demo-specray-grpc"]
    assert service["spec"]["selector"] == {"specray.io/service": "demo-specray", "ray.io/group": "ingress"}
    assert [port["port"] for port in service["spec"]["ports"]] == [9000]


@pytest.mark.parametrize("wanted", ["a", "in(a)", "!in(b, c)", "in(a, x)"])
def test_selectors_of_one_group_put_the_ingress_into_it(helm: Renderer, wanted: str) -> None:
    values = {
        "workerGroups": [{"name": name, "replicas": 1, "resources": {}} for name in "abc"],
        "config": {"ingress": {"ray_actor_options": {"label_selector": {"specray.io/group": wanted}}}},
    }
    service = helm.objects(merged(IMAGE, values))["Service", "demo-specray-grpc"]
    assert service["spec"]["selector"]["ray.io/group"] == "a"


def test_the_head_shows_every_port_that_is_scraped(helm: Renderer) -> None:
    objects = helm.objects(BIG)
    endpoints = {
        role: [
            endpoint["port"]
            for endpoint in objects["PodMonitor", f"demo-specray-{role}"]["spec"]["podMetricsEndpoints"]
        ]
        for role in ("head", "worker")
    }
    # The Router's metrics come from one pod; otherwise they would be counted twice.
    assert endpoints == {"head": ["metrics", "as-metrics", "dash-metrics", "serve"], "worker": ["metrics"]}
    pods = pod_specs(objects[RAY_SERVICE]["spec"])
    head = {port["name"] for port in pods.pop("head")["containers"][0]["ports"]}
    assert set(endpoints["head"]) <= head
    for pod in pods.values():
        assert [port["name"] for port in pod["containers"][0]["ports"]] == ["metrics", "serve", "grpc"]


def test_a_monitor_shows_the_key_only_where_one_is_asked_for(helm: Renderer) -> None:
    values = merged(BIG, {"config": {"auth": {"keys": [KEY]}}, "podMonitors": {"keySecret": {"name": "key"}}})
    monitor = helm.objects(values)["PodMonitor", "demo-specray-head"]
    shown = {entry["port"]: entry.get("authorization") for entry in monitor["spec"]["podMetricsEndpoints"]}
    key = {"type": "Bearer", "credentials": {"name": "key", "key": "api-key"}}
    assert shown == {"metrics": None, "as-metrics": None, "dash-metrics": None, "serve": key}
    open_paths = {"config": {"auth": {"keys": [KEY], "open_paths": ["/metrics"]}}}
    assert ("PodMonitor", "demo-specray-head") in helm.objects(merged(BIG, open_paths))


def test_the_network_policy_lets_in_who_is_named_and_the_operator(helm: Renderer) -> None:
    rules = helm.objects(BIG)["NetworkPolicy", "demo-specray"]["spec"]["ingress"]
    own = {"podSelector": {"matchLabels": {"specray.io/service": "demo-specray"}}}
    ports = [[port["port"] for port in rule.get("ports", [])] for rule in rules]
    assert ports == [[], [8265, 52365, 8000], [8000, 9000], [8000, 8080, 44217, 44227]]
    namespaces = ["gateway", "monitoring"]
    assert rules[0]["from"] == [own]
    name = "kuberay-operator"
    assert rules[1]["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": name}},
        }
    ]
    assert [rule["from"] for rule in rules[2:]] == [
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}] for name in namespaces
    ]
    rules = helm.objects(IMAGE)["NetworkPolicy", "demo-specray"]["spec"]["ingress"]
    assert [rule["from"] for rule in rules[2:]] == [[{"podSelector": {}}]]
