"""The theorem where logits stay on a device: the output is that of the target alone, drawn on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specray.engine import draft as draft_module
from specray.engine import target as target_module
from specray.engine.sampling.device.kernels import TorchKernels
from specray.engine.sampling.device.sampler import DeviceSampler
from specray.types import SamplingParams, Verification
from tests.unit.engine.harness import (
    TARGET,
    VOCAB_SIZE,
    generate_overlapped,
    generate_serial,
    toy_draft,
    toy_target,
)
from tests.unit.engine.samplings import (
    FANOUTS,
    NUM_OUTPUT,
    PROCESSED,
    PROMPT,
    REJECTION,
    SAMPLINGS,
    expected_output,
    session,
)
from tests.unit.engine.trees.drafters import adversarial_drafter, engine_drafter, random_drafter

pytestmark = pytest.mark.slow


def device_sampler(
    vocab_size: int, device: object, max_num_draft_probs: int = 64, **vocabulary: object
) -> DeviceSampler:
    assert set(vocabulary.values()) <= {None, vocab_size}
    return DeviceSampler(TorchKernels(), max_num_draft_probs)


@pytest.fixture(params=["both", "target", "draft"])
def _on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either head alone, too: a draft on a CPU is coupled to a target on a GPU."""
    for name, module in (("draft", draft_module), ("target", target_module)):
        if request.param in ("both", name):
            monkeypatch.setattr(module, "make_sampler", device_sampler)


@pytest.mark.usefixtures("_on_device")
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_output_is_the_targets_alone_with_any_draft(sampling: SamplingParams) -> None:
    expected = expected_output(sampling)
    target, _ = toy_target()
    perfect, close = toy_draft(TARGET)[0], toy_draft()[0]
    for num_drafts in (0, 1, 4):
        drafters = (
            engine_drafter(perfect),
            engine_drafter(close),
            random_drafter(VOCAB_SIZE),
            adversarial_drafter(expected_output(sampling, NUM_OUTPUT + 9), len(PROMPT), VOCAB_SIZE),
        )
        # Without draft tokens all drafters are one.
        for index, drafter in enumerate(drafters if num_drafts else drafters[:1]):
            current = session(sampling)
            assert generate_serial(target, drafter, current, NUM_OUTPUT, num_drafts) == expected
            if index == 0:
                assert set(current.accepted) == {num_drafts}
            for head in (target, perfect, close):
                head.release(["a"])


@pytest.mark.usefixtures("_on_device")
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_output_is_the_targets_alone_with_overlap(sampling: SamplingParams) -> None:
    target, _ = toy_target()
    draft, _ = toy_draft()
    output = generate_overlapped(target, draft, session(sampling), NUM_OUTPUT, 3, FANOUTS["enumerated"])
    assert output == expected_output(sampling)


@pytest.mark.usefixtures("_on_device")
@pytest.mark.parametrize("sampling", [REJECTION, replace(PROCESSED, verification=Verification.REJECTION)])
def test_perfect_draft_under_rejection_is_always_accepted(sampling: SamplingParams) -> None:
    target, _ = toy_target()
    draft, _ = toy_draft(TARGET)
    current = session(sampling)
    generate_serial(target, engine_drafter(draft), current, NUM_OUTPUT, 3)
    assert set(current.accepted) == {3}
