"""The byte-level BPE tokenizer that target and draft share."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS_TOKEN = "<s>"
EOS_TOKEN = "</s>"
BOS_TOKEN_ID = 0
EOS_TOKEN_ID = 1

# A code-completion model has seen no dialogues: what people say becomes comments, what was answered stands as
# code, and the model goes on where the next answer begins.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ message['content'] }}\n"
    "{% else %}"
    "{% for line in message['content'].splitlines() %}"
    "# {{ line }}\n"
    "{% endfor %}"
    "{% endif %}"
    "{% endfor %}"
)


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int = 4096, show_progress: bool = False
) -> Tokenizer:
    """Trains a byte-level BPE; every byte is in the vocabulary, so any text can be encoded.

    Digits stand alone and runs of white space stay whole, which keeps indentation one token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in (BOS_TOKEN, EOS_TOKEN)
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TOKEN} $A",
        pair=f"{BOS_TOKEN} $A {BOS_TOKEN} $B",
        special_tokens=[(BOS_TOKEN, BOS_TOKEN_ID)],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, model_max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json with the chat template inside."""
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory, save_jinja_files=False)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The raw tokenizer of a checkpoint directory."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def encode_files(tokenizer: Tokenizer, texts: Iterable[str], *, batch_size: int = 256) -> Iterator[list[int]]:
    """Yields the token ids of each text as a document: `<s>` text `</s>`."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == batch_size:
            yield from _encode_batch(tokenizer, batch)
            batch = []
    yield from _encode_batch(tokenizer, batch)


def _encode_batch(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=True):
        yield [*encoding.ids, EOS_TOKEN_ID]
