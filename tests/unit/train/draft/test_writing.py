"""Rows of text that a target writes: turns, their markers, and what counts as an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from specray.errors import ConfigError
from specray.train.draft.decoding import CachedDecoder, LibraryDecoder, row_decoder
from specray.train.draft.markers import TurnMarkers, turn_markers
from specray.train.draft.prompts import Beginning, Beginnings, without_head_comment
from specray.train.draft.vocabulary import frequent_ids
from specray.train.draft.writing import draw_tokens, write_rows
from tests.unit.train.toys import toy_llama

MARKERS = TurnMarkers(opening=(1, 5), to_assistant=(2, 11, 12), to_user=(3, 21))


class Template:
    """A tokenizer whose ids are the code points of its characters."""

    chat_template: str | None = "yes"

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        text = "".join(f"[{item['role'][0]}]{item['content']}|" for item in messages)
        return text.replace("\x00", "") if self.is_broken else text + "[a]"

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]


def test_markers_are_what_stands_around_the_turns() -> None:
    markers = turn_markers(Template())
    assert bytes(markers.opening) == b"[u]"
    assert bytes(markers.to_assistant) == b"|[a]"
    assert bytes(markers.to_user) == b"|[u]"


def test_a_template_that_changes_a_turn_is_refused() -> None:
    with pytest.raises(ConfigError, match="drops or changes"):
        turn_markers(Template(is_broken=True))


def test_a_template_whose_turns_end_as_lines_do_is_refused() -> None:
    class Lines(Template):
        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            return "".join(f"# {item['content']}\n" for item in messages)

    with pytest.raises(ConfigError, match="nothing or only white space between turns"):
        turn_markers(Lines())


def test_without_markers_a_template_asks_questions_and_plain_text_begins_as_any() -> None:
    encode = Template().encode

    def ask(question: str) -> list[int]:
        return [9, *encode(question)[:3], 8]

    passages = ["word word.\n\n" * 200]
    drawn = Beginnings(None, encode, passages, seed=3, opening=(7,), ask=ask).draw(60)
    asked = [item for item in drawn if item.token_ids[0] == 9]
    assert all(item.goes_on == "text" for item in drawn)
    assert all(item.token_ids[-1] == 8 for item in asked)
    # 43 % are first words or tasks elsewhere.
    assert 15 < len(asked) < 40
    assert {item.token_ids[0] for item in drawn} == {7, 9}
    # Tasks, and passages without one.
    assert len({item.token_ids[1:4] for item in asked}) > 2


def scripted(next_ids: dict[int, int]) -> LlamaForCausalLM:
    """A model that always follows ``next_ids``: identity embedding, no layers, a permutation as its head."""
    model = toy_llama(0, vocab_size=32).float()
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(32))
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        head = torch.zeros(32, 32)
        for before, after in next_ids.items():
            head[after, before] = 1e4
        model.lm_head.weight = torch.nn.Parameter(head)
    return model


def test_turns_alternate_and_their_markers_are_written_not_drawn() -> None:
    model = scripted({5: 6, 6: 2, 12: 13, 13: 14, 14: 3, 21: 2, 2: 31, 11: 31, 3: 31})
    begin = [Beginning((1, 5), "user"), Beginning((1, 5, 6, 2, 11, 12), "assistant")]
    written = write_rows(model, begin, MARKERS, row_len=14, seed=0)
    whole = [1, 5, 6, 2, 11, 12, 13, 14, 3, 21, 2, 11, 12, 13]
    assert written.token_ids.tolist() == [whole, whole]
    # An answer's tokens are those drawn in the assistant's turn, with the one that ends it.
    answers = [False] * 6 + [True] * 3 + [False] * 4 + [True]
    assert written.is_answer.tolist() == [answers, answers]


def test_plain_text_has_no_turns() -> None:
    model = scripted({7: 2, 2: 3, 3: 7})
    written = write_rows(model, [Beginning((7,), "text")], MARKERS, row_len=6, seed=0)
    assert written.token_ids.tolist() == [[7, 2, 3, 7, 2, 3]]
    assert written.is_answer.tolist() == [[False, True, True, True, True, True]]


def test_what_follows_the_end_of_a_plain_text_is_no_answer() -> None:
    model = scripted({7: 2, 2: 3, 3: 7})
    written = write_rows(model, [Beginning((7,), "text")], MARKERS, row_len=6, seed=0, end_ids=(3, 30))
    assert written.token_ids.tolist() == [[7, 2, 3, 7, 2, 3]]
    assert written.is_answer.tolist() == [[False, True, True, False, False, False]]


def test_a_turn_that_ends_with_another_end_is_ended_as_the_template_ends_turns() -> None:
    # The assistant draws 30, an end of its own; the marker to the user begins with 3, and that is written.
    model = scripted({12: 13, 13: 30, 21: 5})
    begin = [Beginning((1, 5, 2, 11, 12), "assistant")]
    written = write_rows(model, begin, MARKERS, row_len=10, seed=0, end_ids=(30,))
    assert written.token_ids[0, :9].tolist() == [1, 5, 2, 11, 12, 13, 3, 21, 5]
    assert written.is_answer[0, :9].tolist() == [False] * 5 + [True, True] + [False] * 2


def test_rows_that_are_held_out_are_written_at_every_temperature() -> None:
    seen: list[list[float]] = []

    def drawn(logits: torch.Tensor, temperature: torch.Tensor, _: torch.Generator) -> torch.Tensor:
        seen.append(temperature.tolist())
        return logits.argmax(-1)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("specray.train.draft.writing.draw_tokens", drawn)
        for first_place in (0, 24):
            begin = [Beginning((7,), "text")] * 24
            write_rows(scripted({7: 7}), begin, None, row_len=2, seed=0, first_place=first_place)
    places = [*seen[0], *seen[1]]
    assert {round(place, 1) for place in places[::10]} == {0.0, 0.7, 1.0}
    counts = [sum(abs(place - each) < 1e-6 for place in places) for each in (0.0, 0.7, 1.0)]
    assert counts == [24, 12, 12]


def test_beginnings_are_those_of_the_seed_and_end_where_somebody_goes_on() -> None:
    passages = ["word " * 2000]
    encode = Template().encode
    first, again = (Beginnings(MARKERS, encode, passages, seed=3).draw(50) for _ in range(2))
    assert first == again
    assert {item.goes_on for item in first} == {"user", "assistant", "text"}
    for item in first:
        ends = item.token_ids[-len(MARKERS.to_assistant) :] == MARKERS.to_assistant
        assert ends == (item.goes_on == "assistant")
        assert (item.token_ids[:2] == MARKERS.opening) == (item.goes_on != "text")


def test_a_licence_at_the_head_of_a_file_is_left_out() -> None:
    assert without_head_comment("# Copyright\n#\n\n# MIT\nimport os\n# why\nx = 1\n") == (
        "import os\n# why\nx = 1\n"
    )
    assert without_head_comment("# nothing else\n") == ""


def test_frequent_ids_cover_the_share_and_what_must_be_there() -> None:
    ids = np.array([7] * 500 + [9] * 300 + list(range(1000, 1200)), np.uint16)
    few = frequent_ids(ids, share=0.8, max_num_ids=2, always=(3,))
    assert few.tolist() == [3, 7]
    assert frequent_ids(ids, share=0.8, max_num_ids=1000).tolist()[:2] == [7, 9]
    everything = frequent_ids(ids, share=1.0, max_num_ids=10_000)
    assert set(everything.tolist()) == set(ids.tolist())


def test_rows_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    model = toy_llama(1, vocab_size=32)
    begin = [Beginning((1, 5), "user")] * 4
    rows = [write_rows(model, begin, MARKERS, row_len=24, seed=seed).token_ids.tolist() for seed in (4, 4, 5)]
    assert rows[0] == rows[1] != rows[2]


def test_without_turns_all_beginnings_are_plain_text() -> None:
    drawn = Beginnings(None, Template().encode, ["word " * 2000], seed=3).draw(20)
    assert {item.goes_on for item in drawn} == {"text"}
    written = write_rows(scripted({7: 2, 2: 0, 0: 7}), [Beginning((7,), "text")], None, row_len=5, seed=0)
    # Not even the stand-in's id ends a turn that there is not.
    assert written.token_ids.tolist() == [[7, 2, 0, 7, 2]]


@torch.no_grad()
def test_the_librarys_loop_decodes_as_the_fast_one_for_llama() -> None:
    model = toy_llama(1, vocab_size=32, num_layers=2).float()
    fast, general = row_decoder(model, num_rows=2, max_len=8), LibraryDecoder(model)
    assert isinstance(fast, CachedDecoder)
    for ids in ([[1, 5, 9], [2, 3, 4]], [[7], [8]], [[30], [31]]):
        logits = [decoder.forward(torch.tensor(ids)) for decoder in (fast, general)]
        assert torch.allclose(*logits, atol=1e-6)


def test_other_models_are_decoded_by_the_library() -> None:
    class Other(LlamaForCausalLM):
        pass

    assert isinstance(
        row_decoder(Other(toy_llama(1, vocab_size=32, num_layers=2).config), num_rows=1, max_len=8),
        LibraryDecoder,
    )


def test_ids_beyond_two_bytes_are_kept() -> None:
    model = toy_llama(1, vocab_size=70_000)
    written = write_rows(model, [Beginning((69_999, 4, 68_000), "text")], None, row_len=4, seed=0)
    assert written.token_ids[0, :3].tolist() == [69_999, 4, 68_000]


def test_draws_have_the_models_distribution_at_the_rows_temperature() -> None:
    probs = torch.tensor([0.0, 0.1, 0.2, 0.0, 0.3, 0.4, 0.0])
    num_rows = 30_000
    logits = (probs.log()).expand(num_rows, 7)
    temperature = torch.tensor([1.0, 0.5, 0.0]).repeat(num_rows // 3)
    drawn = draw_tokens(logits, temperature, torch.Generator().manual_seed(0))
    squares = probs**2
    for first, expected in enumerate((probs, squares / squares.sum(), torch.eye(7)[5])):
        found = torch.bincount(drawn[first::3], minlength=7) / (num_rows // 3)
        assert float((found - expected).abs().max()) < 0.02
        assert torch.equal(found > 0, expected > 0)
