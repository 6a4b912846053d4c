"""What one adapter accepts is the prior of its own sessions, and of no others."""

from __future__ import annotations

from dataclasses import replace

from specray.control.controller import Controller
from specray.control.draft_length import MAX_ADAPTERS, PRIOR_ACCEPTANCE
from specray.control.state import Plan, SessionStats, TreeVerdict
from specray.requests import AdapterRef, GenerateRequest, SpeculationParams
from specray.types import DraftKind
from tests.unit.router.harness import factory, request, speculation_config


def of(adapter: str) -> GenerateRequest:
    given = request()
    if not adapter:
        return given
    digest = adapter.encode().ljust(32, b"\1")
    ref = AdapterRef(adapter, digest, adapter)
    return replace(given, adapter=ref, sampling=replace(given.sampling, adapter=digest))


def begin(controller: Controller, adapter: str) -> SessionStats:
    return controller.start_session(of(adapter))


def verify(controller: Controller, stats: SessionStats, num_accepted: int) -> None:
    for _ in range(200):
        controller.observe_proposal(stats, 4, 4)
        controller.observe_round(stats, 4, num_accepted)
        controller.observe_tree(stats, TreeVerdict(8, num_accepted, 4, num_accepted))


def test_an_odd_adapter_spoils_no_other_session() -> None:
    controller = Controller(speculation_config())
    verify(controller, begin(controller, "odd"), 0)
    assert begin(controller, "odd").acceptance.value < 0.05
    assert begin(controller, "").acceptance.value == begin(controller, "other").acceptance.value
    assert begin(controller, "").acceptance.value == PRIOR_ACCEPTANCE
    # What the base has shown is what a new adapter starts from, and nothing that comes later.
    verify(controller, begin(controller, ""), 4)
    assert begin(controller, "").acceptance.value > 0.9
    assert begin(controller, "new").acceptance.value > 0.9
    assert begin(controller, "odd").acceptance.value < 0.05
    assert begin(controller, "other").acceptance.value == PRIOR_ACCEPTANCE


def test_k_follows_each_adapter() -> None:
    controller = Controller(speculation_config(overlap="serial"))
    for rows, seconds in ((1, 0.02), (2, 0.0201), (8, 0.021), (32, 0.025)):
        for _ in range(20):
            controller.cost_model.target.add(rows, seconds, is_overlapped=False, num_sequences=1)
    length = controller.length_of(DraftKind.NGRAM, prior_acceptance=0.5)
    for adapter, num_accepted in (("odd", 0), ("good", 4)):
        stats = length.start_session(of(adapter))
        for _ in range(100):
            length.observe_round(stats, 4, num_accepted)

    def plan(adapter: str) -> Plan:
        return length.plan(length.start_session(of(adapter)), num_remaining=100, num_running=1)

    assert plan("odd").num_speculative_tokens < plan("").num_speculative_tokens
    assert plan("").num_speculative_tokens < plan("good").num_speculative_tokens


def test_few_adapters_are_remembered_and_a_forgotten_one_counts_as_the_base() -> None:
    controller = Controller(speculation_config())
    first = begin(controller, "first")
    verify(controller, first, 0)
    for number in range(MAX_ADAPTERS):
        begin(controller, f"{number}")
    assert begin(controller, "first").acceptance.value == PRIOR_ACCEPTANCE


def test_past_outputs_are_a_tenants_by_the_same_adapter() -> None:
    made = factory(past_output_tokens=1000)

    def store(tenant: str, adapter: str) -> object:
        given = replace(of(adapter), speculation=SpeculationParams(tenant=tenant))
        proposer = made.local(given, DraftKind.SUFFIX)
        assert proposer is not None
        return proposer.store

    assert store("a", "sql") is store("a", "sql") is not None
    assert store("", "sql") is None
    stores = [store(tenant, adapter) for tenant in ("a", "b") for adapter in ("", "sql", "chat")]
    assert len({id(each) for each in stores}) == 6


def test_prefixes_differ_by_adapter_and_by_salt() -> None:
    salted = replace(of("sql"), sampling=replace(of("sql").sampling, cache_salt="s"))
    roots = [each.prefix_root for each in (of(""), of("sql"), of("chat"), salted)]
    assert len(set(roots)) == 4
    assert of("sql").prefix_root == of("sql").prefix_root
