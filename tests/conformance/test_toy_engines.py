"""The theorem over toy heads: whatever drafts, and in whichever order, the output is the target's alone.

What the output is compared with is ``target_only``: one token at a time, without engine, draft or cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from specray.draft_tokens import NO_DRAFT, DraftTokens, LookaheadBudget, TreeBudget
from specray.engine.drafting import engine as draft_module
from specray.engine.drafting.engine import DraftEngine
from specray.engine.sampling.device.kernels import Kernels
from specray.engine.sampling.device.sampler import DeviceSampler
from specray.engine.target import engine as target_module
from specray.types import Proposal, SamplingParams, Verdict
from tests.pairwise import pairs
from tests.unit.engine.cache.state_runner import state_draft
from tests.unit.engine.draft_view.toys import toy_viewer
from tests.unit.engine.guesses.guessers import CASCADES, masks
from tests.unit.engine.harness import (
    TARGET,
    VOCAB_SIZE,
    Drafter,
    Session,
    commit,
    generate_overlapped,
    generate_serial,
    model_logits,
    speculate_item,
    target_only,
    toy_draft,
    toy_target,
    verify_item,
)
from tests.unit.engine.samplings import (
    BAD_WORDS,
    FANOUTS,
    NUM_OUTPUT,
    PROMPT,
    SAMPLINGS,
    assert_all_free,
    expected_output,
    session,
)
from tests.unit.engine.trees.drafters import (
    adversarial_drafter,
    dying_drafter,
    empty_drafter,
    engine_drafter,
    random_drafter,
    tree_drafter,
)

ALL_SAMPLINGS = {**SAMPLINGS, "bad-words": BAD_WORDS}
TRIMMED = (1, 3, 4, 5, 9, 12, 13, 17, 21)
ENGINES: Mapping[str, Callable[[], DraftEngine]] = {
    "perfect": lambda: toy_draft(TARGET)[0],
    "close": lambda: toy_draft()[0],
    "perfect with states": lambda: state_draft(TARGET)[0],
    "close with states": lambda: state_draft()[0],
    "trimmed": lambda: toy_draft(TARGET, token_ids=TRIMMED)[0],
    "intersect": lambda: toy_viewer("intersect")[0],
    "retokenize": lambda: toy_viewer("retokenize")[0],
    "window": lambda: toy_viewer(window=6)[0],
    "intersect-window": lambda: toy_viewer("intersect", window=9)[0],
    "retokenize-window": lambda: toy_viewer("retokenize", window=7)[0],
    "masks": lambda: toy_draft(TARGET, guesser=masks())[0],
    **{
        f"{name} cascade": lambda name=name: toy_draft(TARGET, guesser=CASCADES[name]())[0]  # type: ignore[misc]
        for name in ("ngram", "close", "lossy")
    },
}
KNOWN = dict[str, Callable[[list[int]], Drafter]]
DRAFTERS: KNOWN = {
    "random": lambda output: random_drafter(VOCAB_SIZE),
    "tree": lambda output: tree_drafter(output, len(PROMPT), VOCAB_SIZE),
    "adversarial": lambda output: adversarial_drafter(output, len(PROMPT), VOCAB_SIZE),
    "empty": lambda output: empty_drafter,
    "dying": lambda output: dying_drafter(toy_draft()[0], rounds=3),
}
"""By what the target will say: those that are no engine, and take serial rounds alone."""
BUDGETS = {"likeliest": TreeBudget(12), "shape": TreeBudget.of_widths((3, 2, 1))}
LENGTHS = [k if k in (0, 1, 4) else pytest.param(k, marks=pytest.mark.slow) for k in range(9)]
"""None, and up to two blocks of four slots."""


def go_together(name: str, sampling: SamplingParams, k: int, order: str, device: str) -> bool:
    if name in DRAFTERS and (order != "serial" or device == "draft"):
        return False
    # A sampler on a device knows the target's own tokens alone.
    if device in ("draft", "both") and name not in ("perfect", "close", "masks", *DRAFTERS):
        return False
    return (k == 0) <= (order not in BUDGETS) and (name == "empty") <= (k == 0)


DEVICES = ("none", "target", "draft", "both")
"""Heads whose logits stay on a device; a draft on a CPU is coupled to a target on a GPU, too."""


def use_device_samplers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for head, module in (("draft", draft_module), ("target", target_module)):
        if device in ("both", head):
            monkeypatch.setattr(module, "make_sampler", device_sampler)


def device_sampler(
    vocab_size: int, device: object, max_num_draft_probs: int = 64, **vocabulary: object
) -> DeviceSampler:
    assert set(vocabulary.values()) <= {None, vocab_size}
    return DeviceSampler(Kernels(), max_num_draft_probs)


@pairs(
    go_together,
    name=(*ENGINES, *DRAFTERS),
    sampling=ALL_SAMPLINGS,
    k=LENGTHS,
    order=("serial", *BUDGETS, *FANOUTS),
    device=DEVICES,
)
def test_output_is_the_targets_alone(
    name: str, sampling: SamplingParams, k: int, order: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_device_samplers(device, monkeypatch)
    draft = ENGINES[name]() if name in ENGINES else None
    target, current = toy_target()[0], session(sampling)
    if draft is None:
        drafter = DRAFTERS[name](expected_output(sampling, NUM_OUTPUT + 9))
        output = generate_serial(target, drafter, current, NUM_OUTPUT, k)
    elif order in FANOUTS:
        output = generate_overlapped(target, draft, current, NUM_OUTPUT, k, FANOUTS[order])
    else:
        drafter = tree_of(draft, BUDGETS[order]) if order in BUDGETS else engine_drafter(draft)
        output = generate_serial(target, drafter, current, NUM_OUTPUT, k)
    assert output == expected_output(sampling)
    if name == "adversarial":
        assert set(current.accepted) == {0}
    if name.startswith("perfect") and order == "serial":
        assert set(current.accepted) == {k}
    for engine in (target, draft):
        if engine is not None:
            assert_all_free(engine)


def tree_of(draft: DraftEngine, budget: TreeBudget) -> Drafter:
    def drafter(current: Session, count: int) -> DraftTokens:
        [reply] = draft.speculate([replace(speculate_item(current, count), tree=budget)]).replies
        assert isinstance(reply, Proposal), reply
        draft.check_integrity()
        return reply.draft

    return drafter


LOOKAHEADS = [LookaheadBudget(*size) for size in ((7, 5, 7), (3, 4, 2), (1, 2, 1), (8, 2, 9), (1, 6, 3))]
OTHERS: KNOWN = {name: DRAFTERS[name] for name in ("empty", "random", "tree")}


@pairs(
    budget={str(budget): budget for budget in LOOKAHEADS}, sampling=ALL_SAMPLINGS, other=OTHERS,
)  # fmt: skip
def test_output_is_the_targets_alone_with_lookahead(
    budget: LookaheadBudget, sampling: SamplingParams, other: Callable[[list[int]], Drafter]
) -> None:
    """Also beside draft tokens of others, in rounds without, and after a loss."""
    target, current, offered = toy_target()[0], session(sampling), NO_DRAFT
    drafter = other(expected_output(sampling, NUM_OUTPUT + 9))
    for index in range(40):
        if len(current.token_ids) >= len(PROMPT) + NUM_OUTPUT:
            break
        drafted = offered if index % 3 else drafter(current, index % 7) or offered
        asked = None if index % 5 == 4 else budget
        if index == 6:
            target.release(["a"])
            current.target_len = 0
        [verdict] = target.verify([replace(verify_item(current, drafted), lookahead=asked)]).replies
        assert isinstance(verdict, Verdict), verdict
        commit(current, drafted, verdict)
        target.check_integrity()
        offered = verdict.draft
        assert asked is not None or offered == NO_DRAFT
    assert current.token_ids[len(PROMPT) :][:NUM_OUTPUT] == expected_output(sampling)
    assert_all_free(target)


def test_output_does_not_depend_on_who_shares_the_batch() -> None:
    """Prompts that are chunked, sampled items and recoveries of other requests in the same step."""
    target, _ = toy_target(max_num_batched_tokens=16)
    sessions = [
        Session(name, PROMPT[: 3 + i] * (i + 1), replace(sampling, num_prompt_tokens=(3 + i) * (i + 1)))
        for i, (name, sampling) in enumerate(zip("abcd", SAMPLINGS.values(), strict=True))
    ]
    prompts = [list(current.token_ids) for current in sessions]
    drafter = random_drafter(VOCAB_SIZE)
    for round_index in range(10):
        drafted = [drafter(current, (i + round_index) % 4) for i, current in enumerate(sessions)]
        items = [verify_item(current, tokens) for current, tokens in zip(sessions, drafted, strict=True)]
        replies = target.verify(items).replies
        assert [reply.request_id for reply in replies] == list("abcd")
        for current, tokens, reply in zip(sessions, drafted, replies, strict=True):
            assert isinstance(reply, Verdict)
            commit(current, tokens, reply)
        if round_index == 5:
            target.release(["b"])
            sessions[1].target_len = 0
    for current, prompt in zip(sessions, prompts, strict=True):
        count = len(current.token_ids) - len(prompt)
        assert current.token_ids[len(prompt) :] == target_only(
            lambda prefix: model_logits(TARGET, prefix), prompt, current.sampling, count
        )
