"""A request goes where it is answered soonest: by what caches hold, by loads, and by chance among equals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from specray.errors import EngineLostError, OverloadedError
from specray.prefix_keys import UNIT_TOKENS
from specray.requests import FinishReason, GenerateRequest, OutputChunk, Resumption, RouterLoad
from specray.routing import RouterChoice
from specray.routing.choice import MAX_MATCHED_UNITS
from specray.types import SamplingParams

IDLE = RouterLoad(num_places=8, prefill_tokens_per_s=1000.0, step_s=0.01)
ROUTERS = ("a", "b", "c")
PROMPT = tuple(range(1, 321))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _request(name: str, prompt: tuple[int, ...] = PROMPT, **changes: object) -> GenerateRequest:
    request = GenerateRequest(name, prompt, SamplingParams(), max_tokens=16)
    return replace(request, **changes)  # type: ignore[arg-type]


def _choice(**loads: RouterLoad) -> RouterChoice:
    choice = RouterChoice(Clock(), seed=1)
    for router in ROUTERS:
        choice.loads.tell(router, loads.get(router, IDLE), 0.0)
    return choice


def _first(name: str) -> OutputChunk:
    return OutputChunk(name, (7,))


def _last(name: str, num_cached_tokens: int = 0, load: RouterLoad | None = None) -> OutputChunk:
    reason = FinishReason.LENGTH
    return OutputChunk(name, (8,), finish_reason=reason, num_cached_tokens=num_cached_tokens, load=load)


def _serve(choice: RouterChoice, request: GenerateRequest, output: tuple[int, ...] = (7, 8)) -> str:
    router = choice.choose(request, ROUTERS)[0]
    expected = choice.last[-1].num_expected_tokens
    choice.on_chunk(_first(request.request_id))
    choice.on_chunk(_last(request.request_id, expected), output)
    return router


def test_the_next_turn_goes_where_the_output_of_the_last_one_is() -> None:
    choice = _choice()
    output = tuple(range(900, 980))
    router = _serve(choice, _request("1"), output)
    assert choice.last[-1].reason == "tie"
    assert choice.choose(_request("2", (*PROMPT, *output, *range(40))), ROUTERS)[0] == router
    assert choice.last[-1].reason == "prefix"
    # 320 tokens of the prompt and 79 of the output, in whole units; the last token has not been computed.
    assert choice.last[-1].num_expected_tokens == 384


def test_a_prompt_that_is_whole_in_the_cache_has_its_last_unit_computed_again() -> None:
    choice = _choice()
    _serve(choice, _request("1"))
    choice.choose(_request("2"), ROUTERS)
    assert choice.last[-1].num_expected_tokens == len(PROMPT) - UNIT_TOKENS


def test_a_prefix_is_expected_only_once_it_was_computed() -> None:
    choice = _choice()
    first = choice.choose(_request("1"), ROUTERS)[0]
    assert choice.choose(_request("2"), ROUTERS)[0] != first
    choice.on_chunk(_first("1"))
    choice.choose(_request("3"), ROUTERS)
    assert choice.last[-1].num_expected_tokens == 304


def test_a_queue_longer_than_the_prefill_makes_a_second_copy() -> None:
    choice = _choice()
    router = _serve(choice, _request("1"))
    choice.loads.tell(router, replace(IDLE, num_waiting_tokens=200), 1.0)
    assert choice.choose(_request("2"), ROUTERS)[0] == router
    choice.on_end("2")
    choice.loads.tell(router, replace(IDLE, num_waiting_tokens=400), 2.0)
    assert choice.choose(_request("3"), ROUTERS)[0] != router
    assert choice.last[-1].num_expected_tokens == 0


def test_requests_of_one_moment_see_each_other() -> None:
    choice = _choice()
    chosen = Counter(choice.choose(_request(str(n), (n,) * 200), ROUTERS)[0] for n in range(9))
    assert set(chosen.values()) == {3}


def test_what_a_router_says_includes_what_it_was_sent_before() -> None:
    choice = _choice()
    clock = Clock()
    choice = RouterChoice(clock, seed=1)
    router = choice.choose(_request("1"), ROUTERS)[0]
    assert choice.loads.now([router])[router].num_waiting_tokens == 320
    clock.now = 0.05
    choice.loads.tell(router, replace(IDLE, num_waiting_tokens=20), clock.now)
    assert choice.loads.now([router])[router].num_waiting_tokens == 340
    clock.now = 0.15
    choice.loads.tell(router, replace(IDLE, num_waiting_tokens=320), clock.now)
    assert choice.loads.now([router])[router].num_waiting_tokens == 320


def test_equals_are_chosen_by_chance_and_by_session() -> None:
    chosen = Counter(_choice_of_one(seed) for seed in range(60))
    assert set(chosen) == set(ROUTERS) and min(chosen.values()) > 8
    assert len({_choice_of_one(seed, session="s") for seed in range(9)}) == 1
    assert len({_choice_of_one(0, session=str(n)) for n in range(20)}) == 3


def _choice_of_one(seed: int, session: str = "") -> str:
    return RouterChoice(Clock(), seed=seed).choose(_request("1", session=session), ROUTERS)[0]


def test_a_session_forces_nothing() -> None:
    choice = _choice()
    router = _serve(choice, _request("1", session="s"))
    choice.loads.tell(router, replace(IDLE, num_waiting_tokens=5000), 1.0)
    assert choice.choose(_request("2", session="s"), ROUTERS)[0] != router


def test_a_full_router_comes_last_and_one_that_refused_is_full_until_it_speaks() -> None:
    full = replace(IDLE, num_running=8)
    choice = _choice(a=full, b=replace(IDLE, num_waiting_tokens=9000), c=full)
    assert choice.choose(_request("1"), ROUTERS)[0] == "b"
    choice.on_end("1", OverloadedError("full"))
    assert choice.choose(_request("2"), ROUTERS)[0] in "ac"
    assert choice.last[-1].reason == "full"
    choice.on_end("2")
    choice.loads.tell("b", IDLE, 1.0)
    assert choice.choose(_request("3"), ROUTERS)[0] == "b"


def test_a_wrong_expectation_mends_the_map() -> None:
    choice = _choice()
    old, new = _request("old", (5,) * 100), _request("new")
    router = _serve(choice, old)
    choice.loads.tell(router, IDLE, 1.0)
    for other in set(ROUTERS) - {router}:
        choice.loads.tell(other, replace(IDLE, num_running=8), 1.0)
    assert _serve(choice, new) == router
    choice.choose(replace(new, request_id="again"), ROUTERS)
    # Its cache was lost: what is older than the missing unit is gone as well.
    choice.on_chunk(_last("again", num_cached_tokens=0))
    choice.choose(replace(old, request_id="old again"), ROUTERS)
    assert choice.last[-1].num_expected_tokens == 0
    choice.choose(replace(new, request_id="new again"), ROUTERS)
    assert choice.last[-1].num_expected_tokens == 304


def test_one_unit_less_than_expected_is_no_mistake() -> None:
    choice = _choice()
    router = _serve(choice, _request("old", (5,) * 100))
    for other in set(ROUTERS) - {router}:
        choice.loads.tell(other, replace(IDLE, num_running=8), 1.0)
    _serve(choice, _request("new"))
    choice.choose(_request("again"), ROUTERS)
    choice.on_chunk(_last("again", num_cached_tokens=304 - UNIT_TOKENS))
    choice.choose(_request("old again", (5,) * 100), ROUTERS)
    assert choice.last[-1].num_expected_tokens == 96


@pytest.mark.parametrize(
    "request_",
    [
        _request("2", PROMPT[:63]),
        _request("2", sampling=SamplingParams(num_prompt_logprobs=0)),
        _request("2", sampling=SamplingParams(cache_salt="other")),
    ],
    ids=["short", "prompt logprobs", "another salt"],
)
def test_nothing_is_expected_where_nothing_may_be_found(request_: GenerateRequest) -> None:
    choice = _choice()
    _serve(choice, _request("1"))
    choice.choose(request_, ROUTERS)
    assert choice.last[-1].num_expected_tokens == 0


def test_a_prompt_beyond_the_longest_look_is_expected_to_go_on() -> None:
    choice = _choice()
    prompt = tuple(range(MAX_MATCHED_UNITS * UNIT_TOKENS + 500))
    _serve(choice, _request("1", prompt))
    choice.choose(_request("2", prompt), ROUTERS)
    assert choice.last[-1].num_expected_tokens == len(prompt) - 1


def test_a_resumed_output_is_part_of_the_prefix_and_its_lost_router_is_not_expected_to_have_it() -> None:
    choice = _choice()
    router = _serve(choice, _request("1"), tuple(range(500, 600)))
    resumed = Resumption(tuple(range(500, 600)), "checkpoint")
    choice.choose(_request("2", resumed=resumed), ROUTERS)
    assert choice.last[-1].num_expected_tokens == 416
    choice.on_end("2", EngineLostError("lost"))
    others = [other for other in ROUTERS if other != router]
    choice.choose(_request("3", resumed=resumed), others)
    assert choice.last[-1].num_expected_tokens == 0


def test_a_request_that_went_elsewhere_teaches_the_map_about_that_router() -> None:
    choice = _choice()
    best, second, *_ = choice.choose(_request("1"), ROUTERS)
    choice.on_elsewhere("1", second)
    assert choice.loads.now([best])[best].num_waiting_tokens == 0
    assert choice.loads.now([second])[second].num_waiting_tokens == 320
    choice.on_chunk(_first("1"))
    choice.on_chunk(_last("1"), (7, 8))
    assert choice.choose(_request("2"), ROUTERS)[0] == second


def test_a_router_that_nobody_has_heard_of_counts_as_idle_and_as_fast_as_the_others() -> None:
    choice = RouterChoice(Clock(), seed=1)
    choice.loads.tell("a", replace(IDLE, num_running=4), 0.0)
    assert choice.choose(_request("1"), ("a", "new"))[0] == "new"
    assert choice.last[-1].costs == pytest.approx({"a": 0.32 + 0.005, "new": 0.32})
