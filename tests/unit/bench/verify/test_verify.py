"""Services that are right and services with a fault, as ``specray verify`` sees them over HTTP."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specray.bench.plans import VerifyPlan
from specray.bench.verify.outputs import Agreement, VerifiedOutput, agreement
from specray.bench.verify.plan import CASES, SELF, WAYS
from specray.bench.verify.report import verify_json, verify_table
from specray.bench.verify.run import VerifyResult, verify
from specray.bench.verify.samples import read_likely
from specray.bench.verify.tasks import Task
from specray.errors import ConfigError, EngineLostError, InvalidRequestError, SpecrayError
from specray.fakes import FakeRouterClient
from specray.requests import GenerateRequest, OutputChunk
from specray.types import DraftKind, TokenLogprobs, Verification
from tests.unit.serving.http.service import INFO, TOKENIZER, serving

pytestmark = pytest.mark.slow

VOCABULARY = TOKENIZER.encode("hello, a ")
SHARES = {token: count / len(VOCABULARY) for token, count in Counter(VOCABULARY).most_common()}
"""Probability of each token, at any place, likeliest first."""
PLAN: dict[str, Any] = {"max_tokens": 8, "num_samples": 16}
PROMPTS = ["a", "he", "hello"]
Reply = Callable[[GenerateRequest], Sequence[int]]


def honest(request: GenerateRequest) -> list[int]:
    draws = random.Random(f"{request.sampling.seed}, {request.prompt_token_ids}")
    return [draws.choice(VOCABULARY) for _ in range(request.max_tokens)]


class Service(FakeRouterClient):
    """A router that offers no draft model, and scores prompts by the shares from which it draws."""

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        chunk = await super().complete(request)
        if request.sampling.num_prompt_logprobs is None:
            return chunk
        logprobs = tuple(math.log(share) for share in SHARES.values())
        scores = [
            TokenLogprobs(token, math.log(SHARES.get(token, 1e-9)), tuple(SHARES), logprobs)
            for token in request.prompt_token_ids[1:]
        ]
        return replace(chunk, prompt_logprobs=tuple(scores))

    def _take(self, request: GenerateRequest) -> None:
        if request.speculation.draft is DraftKind.MODEL:
            raise InvalidRequestError("there is no draft model", field="speculation.draft")
        super()._take(request)


async def verified(
    reply: Reply = honest, prompts: Sequence[str] = PROMPTS, tasks: Sequence[Task] = (), **changed: Any
) -> VerifyResult:
    async with serving(Service(reply=reply, info=INFO)) as service:
        plan = VerifyPlan(url=service.url, **{**PLAN, **changed})
        return await verify(plan, prompts, tasks, lambda *_: None)


async def ended_by(words: str, refuses: Callable[[GenerateRequest], bool]) -> None:
    """Verifies a service that refuses some requests, and expects that the run ends with this error."""

    class Refusing(Service):
        def _take(self, request: GenerateRequest) -> None:
            if refuses(request):
                raise InvalidRequestError(words, field="prompt_logprobs")
            super()._take(request)

    async with serving(Refusing(reply=honest, info=INFO)) as service:
        with pytest.raises(InvalidRequestError, match=f"the server answers 400: {words}"):
            await verify(VerifyPlan(url=service.url, **PLAN), PROMPTS, [], lambda *_: None)


def names(result: VerifyResult) -> set[tuple[str, str]]:
    return {(one.case, one.way) for one in result.faults}


async def test_a_service_that_is_right_has_no_fault_even_exactly() -> None:
    result = await verified(exact=True)
    assert names(result) == set()
    assert len(result.comparisons) == (len(CASES) + 1) * len(WAYS)
    told = {one.way for one in result.comparisons if one.not_offered}
    assert told == {"draft model, K=4"}
    (greedy,) = (one for one in result.comparisons if (one.case, one.way) == ("greedy", SELF))
    assert greedy.agreement == Agreement(3, 0, 24, 0.0)


async def test_other_tokens_of_one_draft_are_a_fault_of_that_way_alone() -> None:
    def faulty(request: GenerateRequest) -> list[int]:
        tokens = honest(request)
        if request.speculation.draft is DraftKind.NGRAM:
            tokens[2] = VOCABULARY[-1] if tokens[2] != VOCABULARY[-1] else VOCABULARY[0]
        return tokens

    result = await verified(faulty, exact=True, num_samples=0)
    assert names(result) == {(case.name, "n-grams, K=8") for case in CASES}


async def test_other_logprobs_are_a_fault_where_the_service_says_that_it_is_deterministic() -> None:
    class Wider(Service):
        async def complete(self, request: GenerateRequest) -> OutputChunk:
            chunk = await super().complete(request)
            if request.speculation.draft is not DraftKind.NGRAM:
                return chunk
            return replace(
                chunk, logprobs=tuple(replace(one, logprob=one.logprob - 1e-7) for one in chunk.logprobs)
            )

    for is_deterministic in (True, False):
        info = replace(INFO, is_deterministic=is_deterministic)
        async with serving(Wider(reply=honest, info=info)) as service:
            plan = VerifyPlan(
                url=service.url, exact=True, num_samples=0, max_tokens=8, case=["coupled"],
                way=["n-grams, K=8"],
            )  # fmt: skip
            result = await verify(plan, PROMPTS, [], lambda *_: None)
        assert [one.way for one in result.comparisons] == [SELF, "n-grams, K=8"]
        assert names(result) == ({("coupled", "n-grams, K=8")} if is_deterministic else set())


async def test_cases_and_ways_are_called_by_their_names() -> None:
    with pytest.raises(ConfigError, match="way is 'trees'; allowed: 'plain, other batch', 'as the service"):
        await verified(way=["trees"])


async def test_many_divergences_are_a_fault_without_exactness_and_one_is_not() -> None:
    def faulty(request: GenerateRequest) -> list[int]:
        tokens = honest(request)
        is_hit = request.speculation.draft is DraftKind.SUFFIX or (
            request.speculation.draft is DraftKind.NGRAM and request.prompt_token_ids == tuple(prompts[0])
        )
        if is_hit:
            tokens[0] = VOCABULARY[-1] if tokens[0] != VOCABULARY[-1] else VOCABULARY[0]
        return tokens

    texts = [f"a{'h' * count}" for count in range(12)]
    prompts = [TOKENIZER.encode(text) for text in texts]
    result = await verified(faulty, prompts=texts, num_samples=0)
    assert {way for _, way in names(result)} == {"suffixes, K=8"}


async def test_penalties_with_a_wrong_prefix_are_found_under_penalties_only() -> None:
    def faulty(request: GenerateRequest) -> list[int]:
        tokens = honest(request)
        if request.speculation.enabled and request.sampling.presence_penalty:
            tokens[1:] = [VOCABULARY[0] if token != VOCABULARY[0] else VOCABULARY[1] for token in tokens[1:]]
        return tokens

    result = await verified(faulty, exact=True, num_samples=0)
    assert {case for case, _ in names(result)} == {"coupled, penalties and top-p"}


async def test_a_biased_acceptance_is_found_in_samples() -> None:
    def faulty(request: GenerateRequest) -> list[int]:
        tokens = honest(request)
        is_rejection = request.sampling.verification is Verification.REJECTION
        if is_rejection and request.speculation.draft is DraftKind.NGRAM:
            draws = random.Random(request.sampling.seed)
            tokens = [VOCABULARY[0] if draws.random() < 0.25 else token for token in tokens]
        return tokens

    result = await verified(faulty)
    assert names(result) == {("rejection", "n-grams, K=8")}
    (fault,) = result.faults
    assert fault.calibration is not None and fault.calibration.num_tokens == 3 * 16 * 8
    assert str(list(verify_table(result).columns[-1].cells)).count("FAULT: ") == 1


async def test_a_service_that_scores_nothing_is_not_right_but_an_error() -> None:
    await ended_by("no scores", lambda request: request.sampling.num_prompt_logprobs is not None)


async def test_a_service_that_refuses_plain_decoding_is_an_error() -> None:
    await ended_by("no plain", lambda request: not request.speculation.enabled)


async def test_a_way_that_is_refused_after_its_first_request_is_an_error() -> None:
    last = tuple(TOKENIZER.encode("hello"))
    await ended_by(
        "no more",
        lambda request: request.speculation.draft is DraftKind.NGRAM and request.prompt_token_ids == last,
    )


async def test_outputs_that_fill_the_context_are_scored_but_for_their_last_token() -> None:
    result = await verified(prompts=["a"], max_tokens=INFO.max_model_len - 1, num_samples=2)
    found = {one.way: one.calibration for one in result.comparisons if one.case == "rejection"}
    assert found.pop("draft model, K=4") is None
    assert [one and one.num_tokens for one in found.values()] == [2 * (INFO.max_model_len - 2)] * 5


def test_the_token_that_came_is_not_read_as_a_likely_one_by_a_rank_that_counts_ties() -> None:
    listed = {str(token): {"rank": token, "logprob": -float(token)} for token in range(1, 21)}
    for own, rank in ((0, 20), (99, 1), (99, 57), (99, None)):
        place = {str(own): {"rank": rank, "logprob": -20.0}, **listed}
        answer = {"choices": [{"prompt_logprobs": [None, listed, place]}]}
        (first, second) = read_likely(answer, [1, own])
        assert list(first) == list(second) == list(range(1, 21))
    with pytest.raises(SpecrayError, match="lists 21 likeliest tokens; asked for: 20"):
        read_likely({"choices": [{"prompt_logprobs": [place | {"98": place["99"]}]}]}, [99])


async def test_samples_are_of_the_model_alone_and_none_shares_its_noise() -> None:
    service = Service(reply=honest, info=INFO)
    async with serving(service) as running:
        plan = VerifyPlan(url=running.url, **{**PLAN, "num_samples": 9})
        await verify(plan, PROMPTS, [], lambda *_: None)
    sampled = [one for one in service.requests if one.sampling.num_prompt_logprobs is None]
    asked = [one for one in sampled if one.sampling.seed >= 1 << 20 and not one.speculation.enabled]
    assert len(asked) == len({one.sampling.seed for one in asked}) == 3 * 9
    assert {one.sampling.temperature for one in asked} == {1.0}
    scored = [one for one in service.requests if one.sampling.num_prompt_logprobs is not None]
    assert len(scored) == 3 * 9 * (len(WAYS) - 1)
    assert {(one.sampling.num_prompt_logprobs, one.speculation.enabled) for one in scored} == {(20, False)}


def test_agreement_counts_tokens_up_to_the_first_other_one() -> None:
    plain = [VerifiedOutput((1, 2, 3), (-1.0, -2.0, -3.0)), VerifiedOutput((1, 2)), VerifiedOutput((1,))]
    others = [VerifiedOutput((1, 9, 3), (-1.5, -9.0, -3.0)), VerifiedOutput((1, 2)), VerifiedOutput((1, 2))]
    assert agreement(plain, others) == Agreement(3, 2, 2 + 2 + 2, 0.5)


async def test_table_and_json_name_the_faults(tmp_path: Path) -> None:
    def faulty(request: GenerateRequest) -> list[int]:
        tokens = honest(request)
        return tokens[::-1] if request.speculation.draft is DraftKind.NGRAM else tokens

    result = await verified(faulty, exact=True, num_samples=0)
    assert verify_json(result)["faults"] == [f"{case.name}: n-grams, K=8" for case in CASES]
    table = verify_table(result)
    verdicts = list(table.columns[-1].cells)
    assert verdicts.count("FAULT") == len(CASES) and "not offered" in verdicts


async def test_no_server_is_an_error_with_its_address() -> None:
    with pytest.raises(EngineLostError, match=r"server http://127\.0\.0\.1:9"):
        await verify(VerifyPlan(url="http://127.0.0.1:9"), PROMPTS, [], lambda *_: None)
