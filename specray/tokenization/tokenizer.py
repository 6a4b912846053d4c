"""A model's tokenizer: encoding, decoding, chat templates, and the bytes of single tokens."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specray.errors import InvalidRequestError
from specray.tokenization.byte_alphabet import spelled_bytes
from specray.tokenization.chat import ChatMessage, ChatOptions, ChatTemplate
from specray.tokenization.control_tokens import ControlTokens, without_marks
from specray.tokenization.decoders import ByteDecoder, TokenDecoder, WindowDecoder
from specray.tokenization.ends import ends_beside_parts, part_end

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_DEFAULT_OPTIONS = ChatOptions()
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as its template writes it."""

    text: str
    cut: Callable[[], Sequence[str]]
    """Cuts the text into ``pieces``."""
    is_checked: bool
    """No message may become a control token."""

    @functools.cached_property
    def pieces(self) -> Sequence[str]:
        """The text, cut so that no piece holds a control token that a message spells; none is empty."""
        return self.cut()


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    Args:
        backend: the vocabulary, its merges and its decoder.
        special_tokens: ``bos_token``, ``eos_token`` ..., as chat templates name them.
        chat_template: Jinja source; None when the model has none.
        tool_template: Jinja source for requests with tools; default: the same.
        eos_token_ids: tokens that end an output; the one that ends a turn of the template does, too.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self.chat_template = (
            None
            if chat_template is None
            else ChatTemplate(chat_template, self._special_tokens, tool_source=tool_template)
        )
        """The model's template; None when it has none."""
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        names = {backend.id_to_token(token_id): token_id for token_id in self._special_ids}
        self.special_names: Mapping[str, int] = {name: names[name] for name in names if name}
        """Ids of special tokens by their text."""
        self.special_initials = frozenset(name[0] for name in self.special_names)
        """Characters with which the text of a special token begins."""
        self._byte_of = {char: byte for byte, char in enumerate(spelled_bytes())}
        decoder: Any = backend.decoder
        steps = [] if decoder is None else list(_decoder_steps(json.loads(decoder.__getstate__())))
        self._is_byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        self._has_byte_pieces = any(step["type"] == "ByteFallback" for step in steps)
        self._space_mark = next(filter(None, map(_space_mark, steps)), None)
        self._pieces: dict[int, bytes] = {}
        self._listed_ends = frozenset(eos_token_ids)

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an output: those that are listed, and the one that ends the template's turn."""
        names = self.special_names
        end = None if self.chat_template is None else self.chat_template.turn_end(names)
        turn_ends = set() if end is None else {names[end]}
        ends = self._listed_ends | turn_ends | ends_beside_parts(names)
        return tuple(sorted(ends - {part_end(self.special_names)}))

    def named_ends(self) -> str:
        return ", ".join(f"{self.token_text(token_id)} ({token_id})" for token_id in self.eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary with added tokens; the model's own may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def special_id(self, role: str) -> int | None:
        """The id of ``bos_token``, ``eos_token`` ...; None: there is none."""
        token = self._special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def spells_bytes(self) -> bool:
        """Tokens stand for the same bytes wherever they are."""
        return self._is_byte_level or self._has_byte_pieces

    @functools.cached_property
    def control_ids(self) -> frozenset[int]:
        """Tokens that are no text to a grammar: special ones, and added ones in pointed brackets."""
        return self._special_ids | {
            token_id for text, token_id in self._added_ids.items() if text[:1] == "<" and text[-1:] == ">"
        }

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encodes text to token ids, by default with the special tokens that the tokenizer adds."""
        # Characters up to which a text is encoded within a millisecond.
        if len(text) <= 1024:
            return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # ``encode`` keeps all other threads from running until it is done.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoded.ids)

    def encode_inner(self, text: str) -> tuple[int, ...]:
        """Encodes a text that others go before: without the space that some put before a text."""
        if self._is_byte_level:
            return self.encode(text, add_special_tokens=False)
        # Such vocabularies put a space before a text, which must not come into its middle.
        line = self._line_ids
        with_line = self.encode("\n" + text, add_special_tokens=False)
        if len(with_line) > len(line) and with_line[: len(line)] == line:
            return with_line[len(line) :]
        return self.encode(text, add_special_tokens=False)

    @functools.cached_property
    def _line_ids(self) -> tuple[int, ...]:
        return self.encode("\n", add_special_tokens=False)

    def encode_chat(
        self, messages: Sequence[ChatMessage], options: ChatOptions = _DEFAULT_OPTIONS
    ) -> tuple[int, ...]:
        """Encodes a conversation by the model's template.

        Text of messages, tools and variables never becomes control tokens, unless the options allow it.

        Raises:
            InvalidRequestError: there is no template, or it rejects this conversation.
        """
        return self.encode_rendered(self.rendered(messages, options))

    def rendered(
        self, messages: Sequence[ChatMessage], options: ChatOptions = _DEFAULT_OPTIONS
    ) -> RenderedChat:
        """Returns the text of a conversation, not yet encoded; raises like ``encode_chat``."""
        marked = self._render(messages, options)
        if options.allows_special_tokens:
            return RenderedChat(marked, lambda: (marked,), is_checked=False)
        cut = functools.partial(self._control_tokens.pieces, marked)
        return RenderedChat(without_marks(marked), cut, is_checked=True)

    def encode_rendered(self, chat: RenderedChat) -> tuple[int, ...]:
        """Encodes the text of a conversation; raises like ``encode_chat``."""
        token_ids = self._encode_pieces(chat.pieces)
        if chat.is_checked:
            self._control_tokens.check(chat.pieces, token_ids)
        return token_ids

    def least_tokens(self, text: str) -> int:
        """The fewest tokens that a text of this length can have: as many as the longest token needs."""
        return -(-len(text) // self.longest_token_len)

    @functools.cached_property
    def longest_token_len(self) -> int:
        """Most characters of one token; at least 1."""
        return max(map(len, self.vocabulary), default=1) or 1

    def added_token_id(self, text: str) -> int | None:
        """The id of the added token that is this text; None: there is none."""
        return self._added_ids.get(text)

    def _render(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        if self.chat_template is None:
            raise InvalidRequestError(
                "messages: this model has no chat template; use /v1/completions", field="messages"
            )
        marked = (lambda value: value) if options.allows_special_tokens else self._control_tokens.marked
        return self.chat_template.render(messages, options, marked)

    @functools.cached_property
    def _control_tokens(self) -> ControlTokens:
        """Special tokens, and added tokens that the chat template writes, such as ``<tool_call>``."""
        template = self.chat_template
        sources = "" if template is None else template.all_sources
        return ControlTokens(
            {
                text: token_id
                for text, token_id in self._added_ids.items()
                if token_id in self._special_ids
                or (text == text.strip() and len(text) > 2 and text in sources)
            }
        )

    @functools.cached_property
    def _added_ids(self) -> dict[str, int]:
        return {
            token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()
        }

    def _encode_pieces(self, pieces: Sequence[str]) -> tuple[int, ...]:
        """Encodes pieces of a text as if each stood alone, at about the cost of the text."""
        if not pieces:
            return ()
        first, *others = pieces
        # Who spells many control tokens repeats some of their pieces.
        known = self._encode_apart(list(dict.fromkeys(others)))
        token_ids = self.encode(first, add_special_tokens=False)
        return (*token_ids, *itertools.chain.from_iterable(map(known.__getitem__, others)))

    def _encode_apart(self, pieces: Sequence[str]) -> Mapping[str, Sequence[int]]:
        if len(pieces) <= 1 or not self._is_byte_level:
            return {piece: self.encode_inner(piece) for piece in pieces}
        (encoded,) = self._backend.encode_batch([pieces], is_pretokenized=True, add_special_tokens=False)
        known: dict[str, list[int]] = {piece: [] for piece in pieces}
        for token_id, place in zip(encoded.ids, encoded.word_ids, strict=True):
            assert place is not None, "no token is added"
            known[pieces[place]].append(token_id)
        return known

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes tokens to text, without special tokens; incomplete characters become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def info(self) -> dict[str, Any]:
        """Special tokens and chat template by their names in transformers, for clients with a tokenizer."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._special_tokens,
            "vocab_size": self.vocab_size,
            "eos_token_ids": list(self.eos_token_ids),
            "chat_template": None if self.chat_template is None else self.chat_template.source,
        }

    def decoder(self, prompt_token_ids: Sequence[int] = ()) -> TokenDecoder:
        """Makes an incremental decoder for one output, which follows the prompt."""
        return ByteDecoder(self) if self._is_byte_level else WindowDecoder(self, prompt_token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; the name of a special token; empty for an unknown id."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._read_piece(token_id)
        return piece

    def token_text(self, token_id: int) -> str:
        """Token as shown in logprobs: its text, or ``bytes:\\x..`` for a part of a character."""
        piece = self.token_bytes(token_id)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def _read_piece(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return token.encode()
        if not self._is_byte_level:
            return self._read_other_piece(token_id, token)
        table = self._byte_of
        # An added token with characters outside the byte alphabet is plain text.
        if any(char not in table for char in token):
            return token.encode()
        return bytes(table[char] for char in token)

    def _read_other_piece(self, token_id: int, token: str) -> bytes:
        if self._has_byte_pieces and (byte := _BYTE_PIECE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if self._space_mark is not None:
            # A token decoded alone begins the text and loses its space, so restore it to tell both apart.
            return token.replace(self._space_mark, " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


def _decoder_steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _decoder_steps(step)


def _space_mark(step: Mapping[str, Any]) -> str | None:
    """Mark of a space in the vocabulary, such as SentencePiece's ``▁``, if this step replaces one."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    if step["type"] == "Replace" and step["content"] == " ":
        mark = step["pattern"].get("String")
        return str(mark) if mark else None
    return None
