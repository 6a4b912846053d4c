"""Tests of the checkpoints that ship with the package."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from specray.demo.paths import demo_draft_path, demo_target_path

pytestmark = pytest.mark.slow

MAX_TOTAL_BYTES = 32_000_000


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(demo_target_path())


@pytest.mark.parametrize(
    ("path", "fewest", "most"),
    [(demo_target_path(), 8_000_000, 12_000_000), (demo_draft_path(), 800_000, 1_600_000)],
    ids=["target", "draft"],
)
def test_the_checkpoint_is_a_bfloat16_llama_of_the_promised_size(path: Path, fewest: int, most: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert model.config.model_type == "llama"
    assert model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings is True
    assert (model.config.bos_token_id, model.config.eos_token_id) == (0, 1)
    assert fewest <= sum(parameter.numel() for parameter in model.parameters()) <= most


def test_both_have_one_tokenizer_and_vocabulary() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (demo_target_path() / name).read_bytes() == (demo_draft_path() / name).read_bytes()


def test_the_pair_fits_the_package() -> None:
    files = [file for path in (demo_target_path(), demo_draft_path()) for file in path.iterdir()]
    assert sum(file.stat().st_size for file in files) <= MAX_TOTAL_BYTES


def test_no_checkpoint_file_needs_unpickling() -> None:
    for path in (demo_target_path(), demo_draft_path()):
        assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


@given(text=st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False) == text


def test_every_byte_has_a_token(tokenizer: PreTrainedTokenizerFast) -> None:
    # The 243 bytes that UTF-8 can hold, alone or in sequences: each code point of one to four bytes.
    text = "".join(map(chr, [*range(0xD800), 0x10000, 0x3FFFF, 0x10FFFF]))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer) == tokenizer.vocab_size == 4096


def test_code_survives_with_its_indentation(tokenizer: PreTrainedTokenizerFast) -> None:
    code = "def f(x):\n\tif x:\n\t\treturn  'ü'  # 1234\n\n\n        \n"
    assert tokenizer.decode(tokenizer.encode(code), skip_special_tokens=True) == code


def test_the_chat_template_turns_questions_into_comments(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add two numbers.\nIn Python."},
        {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
        {"role": "user", "content": "Now three."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<s># Be brief.\n# Add two numbers.\n# In Python.\ndef add(a, b):\n    return a + b\n# Now three.\n"
    )


def test_the_target_knows_python(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_target_path(), dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("import os\nimport sys\n\n\ndef main():\n    for i in range(")])
    with torch.no_grad():
        log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    loss = -log_probs.gather(1, ids[0, 1:, None]).mean()
    assert float(loss) < 3.0


def test_the_draft_agrees_with_the_target_where_it_writes(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = 'def mean(values):\n    """Return the mean of a list of numbers."""\n'
    target, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (demo_target_path(), demo_draft_path())
    )
    ids = torch.tensor([tokenizer.encode(prompt)])
    with torch.no_grad():
        written = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=100, do_sample=False, eos_token_id=None
        )
        draft_choice = draft(input_ids=written).logits[0, ids.shape[1] - 1 : -1].argmax(-1)
    agreement = (draft_choice == written[0, ids.shape[1] :]).float().mean()
    assert float(agreement) >= 0.5
