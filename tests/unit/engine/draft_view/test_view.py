"""What a draft reads of what the router tells: whole, in pieces, and in a window."""

from __future__ import annotations

import random

import pytest

from specray.config import DraftConfig, TargetConfig
from specray.engine.draft_view.view import DraftView
from specray.engine.window import NUM_SINKS, DraftWindow, with_window
from specray.errors import ConfigError
from specray.types import SamplingParams
from tests.unit.engine.draft_view.toys import MARK, NAMES, BeginningVocabulary, ToyVocabulary
from tests.unit.engine.harness import VOCAB_SIZE

PENALTY = SamplingParams(repetition_penalty=1.3, num_prompt_tokens=2)


def expected_view(told: list[int], vocabulary: ToyVocabulary | None, window: DraftWindow | None) -> list[int]:
    own = [piece for token in told for piece in (vocabulary.read(token) if vocabulary else (token,))]
    if vocabulary and own and own[: len(vocabulary.begin)] != [*vocabulary.begin]:
        own = [*vocabulary.begin, *own]
    start = 0 if window is None else window.start(len(own))
    return [*own[:NUM_SINKS], *own[start:]] if start else own


@pytest.mark.parametrize("num_tokens", [None, 1, 2, 8, 13])
@pytest.mark.parametrize(
    "vocabulary", [None, ToyVocabulary(), BeginningVocabulary()], ids=["same", "other", "begins"]
)
def test_engine_holds_the_view_after_any_tells(
    vocabulary: ToyVocabulary | None, num_tokens: int | None
) -> None:
    """Appends, rollbacks before and within the window, tells that the engine never saw, and repeats."""
    window = None if num_tokens is None else DraftWindow(num_tokens)
    for seed in range(40):
        source = random.Random(seed)
        reading = DraftView(vocabulary, window, PENALTY)
        told: list[int] = []
        held: list[int] = []
        for _ in range(60):
            base_len = len(told) if source.random() < 0.7 else source.randrange(len(told) + 1)
            new = [source.randrange(VOCAB_SIZE) for _ in range(source.choice([0, 1, 1, 3, 7]))]
            told = [*told[:base_len], *new]
            reading.tell(base_len, new, None)
            expected = expected_view(told, vocabulary, window)
            assert reading.num_seen == len(expected)
            assert reading.state.length == len(told) and reading.output_ids == told[2:]
            if source.random() < 0.8:
                kept, behind = reading.update()
                assert kept <= len(held)
                held = [*held[:kept], *behind]
                assert held == expected
                reading.hold()


def test_a_window_that_stays_keeps_what_is_computed() -> None:
    reading = DraftView(None, DraftWindow(8), PENALTY)
    reading.tell(0, range(100, 116), None)
    assert reading.update() == (0, [100, 101, 102, 103, *range(108, 116)])
    reading.hold()
    reading.tell(16, [1, 2, 3], None)
    assert reading.update() == (12, [1, 2, 3])
    reading.hold()
    reading.tell(19, [4], None)
    assert reading.update() == (4, [*range(112, 116), 1, 2, 3, 4])


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 100])
def test_at_least_the_window_is_seen_and_never_more_than_half_of_it_beside(num_tokens: int) -> None:
    window = DraftWindow(num_tokens)
    for length in range(1, 6 * num_tokens + 40):
        start = window.start(length)
        if start:
            assert num_tokens <= length - start < num_tokens + window.stride
            assert NUM_SINKS + length - start < window.max_model_len - 64
        else:
            assert length < num_tokens + window.stride + NUM_SINKS + 1


def test_tokens_that_are_two_pieces_are_not_proposed_behind() -> None:
    reading = DraftView(ToyVocabulary(), None, PENALTY)
    assert reading.own_ids([1, 2, 7, 3]) == [NAMES[1], NAMES[2]]
    assert ToyVocabulary().read(7) == (MARK, NAMES[7])


def test_window_bounds_the_drafts_sequences() -> None:
    assert with_window(DraftConfig(window=100)).max_model_len == 4 + 100 + 50 + 128
    assert with_window(DraftConfig()).max_model_len is None
    assert with_window(TargetConfig(max_model_len=32)).max_model_len == 32
    with pytest.raises(ConfigError) as caught:
        with_window(DraftConfig(window=100, max_model_len=200))
    assert str(caught.value) == (
        "draft.max_model_len is 200 with draft.window 100; allowed with it: 282 or more"
    )


@pytest.mark.parametrize(
    ("told", "expected"), [([4, 6], [NAMES[5], NAMES[4], NAMES[6]]), ([5, 6], NAMES[5:7])]
)
def test_a_draft_that_begins_its_texts_with_a_token_sees_it_once(
    told: list[int], expected: list[int]
) -> None:
    reading = DraftView(BeginningVocabulary(), None, PENALTY)
    reading.tell(0, told, None)
    assert reading.update() == (0, [*expected])
