"""Plans one chat: its prompt, the grammar of its answer, and how the answer is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, Protocol

from specray.config.live import LiveConfig
from specray.errors import InvalidRequestError
from specray.serving.admission.places import Place
from specray.serving.admission.texts import SECONDS_PER_CHAR, TextWork
from specray.serving.calls.borders import message_tails
from specray.serving.tools.answer import REASONING_CLOSE, REASONING_OPEN, AnswerParser
from specray.serving.tools.forced import after_reasoning, forced_calls, spells_reasoning
from specray.serving.tools.formats import MARKERS, ToolFormat, find_format
from specray.serving.tools.harmony.answer import ChannelReader
from specray.serving.tools.harmony.channels import Channels
from specray.serving.tools.harmony.forced import forced_channels
from specray.serving.tools.harmony.prompt import ChannelPrompt, read_prompt
from specray.serving.tools.request import ToolMode, ToolUse
from specray.serving.validation import GenerationOptions
from specray.tokenization import ChatMessage, ChatOptions, Tokenizer
from specray.types import Grammar

_TOOLS_FIELD: Final = "tools"
GrammarReader = Callable[[Callable[[], Grammar | None]], Awaitable[Grammar | None]]
"""Calls a function elsewhere, and returns what it returns."""
Images = Literal["auto", "refuse", "placeholder"]
"""What becomes of images, see ``http.images``."""


class Conversation(Protocol):
    """One chat, whatever the API. All methods raise InvalidRequestError for what is malformed."""

    @property
    def stream(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool | None:
        """Whether the answer goes on with the last message."""

    def tool_use(self) -> ToolUse | None: ...

    def chat(self, images: Images) -> list[ChatMessage]: ...

    def template_variables(self) -> dict[str, Any]: ...

    def adds_generation_prompt(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of one chat are read."""

    use: ToolUse | None
    """None: no calls are read."""
    tool_format: ToolFormat | None
    reads_reasoning: bool
    begins_in_reasoning: bool
    tells_parts: bool = False
    """The answer is a stream, in which arguments of calls come as they are written."""
    channels: ChannelPrompt | None = None
    """What the prompt has of the answer's first message, where the model writes in channels."""

    @property
    def reads_calls(self) -> bool:
        return self.use is not None and (self.tool_format is not None or self.channels is not None)

    @property
    def is_named(self) -> bool:
        """One function had to be called: such an answer ends with ``stop``."""
        return self.use is not None and self.use.is_named

    def parser(self) -> AnswerParser | ChannelReader | None:
        """A parser of one answer; None: all of it is content."""
        if self.channels is not None:
            return self.channels.reader(self.use, tells_parts=self.tells_parts)
        if not self.reads_calls and not self.reads_reasoning:
            return None
        return AnswerParser(
            self.use,
            self.tool_format,
            reads_reasoning=self.reads_reasoning,
            begins_in_reasoning=self.begins_in_reasoning,
            tells_parts=self.tells_parts,
        )


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    token_ids: tuple[int, ...]
    use: ToolUse | None
    """None: no tools are shown."""
    begins_in_reasoning: bool
    may_reason: bool
    """The model may write reasoning first."""
    channels: ChannelPrompt | None = None
    """Where in a message the prompt ends, where the model writes in channels."""
    message_tails: tuple[int, ...] = ()
    """Its last tokens from where the last message begins, and from where it ends."""


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What a chat asks of the router and of its answer."""

    prompt: tuple[int, ...]
    options: GenerationOptions
    """Options of the call, with the grammar of the answer and the special tokens that its reader needs."""
    reading: Reading


class ChatPlanner:
    """Plans the chats of one model.

    Args:
        tokenizer: the target's, with the chat template that says how the model writes reasoning and calls.
        texts: renders and tokenizes.
    """

    def __init__(self, tokenizer: Tokenizer, config: LiveConfig, texts: TextWork) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._texts = texts
        template = tokenizer.chat_template
        source = None if template is None else template.all_sources
        self._channels = Channels.find(source, tokenizer.added_token_id)
        self._tool_format = None if self._channels is not None else find_format(source)
        self._has_reasoning = source is not None and REASONING_CLOSE in source
        markers = MARKERS if self._channels is None else self._channels.ids
        self._marker_ids = frozenset(
            token_id
            for marker in markers
            if (token_id := tokenizer.added_token_id(marker)) is not None and tokenizer.is_special(token_id)
        )

    async def prompt(
        self, body: Conversation, place: Place, check_size: Callable[[int], None] = lambda _: None
    ) -> ChatPrompt:
        """Writes the prompt of one chat.

        Args:
            check_size: is given the least number of its tokens before it is tokenized, and may raise.

        Raises:
            InvalidRequestError: messages, tools or variables are malformed, or the template refuses them.
            OverloadedError, DeadlineExceededError: too many texts of others go first.
        """
        use = body.tool_use()
        if use is not None and use.mode is ToolMode.NONE:
            # Plain text is asked for; a model that knows the tools might write a call into it.
            use = None
        if use is not None:
            self._check_tools()
        chat = ChatOptions(
            tools=() if use is None else use.definitions,
            variables=body.template_variables(),
            adds_generation_prompt=body.adds_generation_prompt(),
            continues_final_message=bool(body.continue_final_message),
            allows_special_tokens=self._config.now.chat.allow_special_tokens,
        )
        images = self._config.now.http.images

        def written() -> ChatPrompt:
            messages = body.chat(images)
            rendered = self._tokenizer.rendered(messages, chat)
            text = rendered.text
            check_size(self._tokenizer.least_tokens(text))
            check_size(len(rendered.pieces))
            token_ids = self._tokenizer.encode_rendered(rendered)
            tails = message_tails(messages[-1].content, text, token_ids, self._tokenizer)
            if self._channels is not None:
                end = read_prompt(self._channels, token_ids, self._tokenizer.token_text)
                return ChatPrompt(token_ids, use, False, False, end, tails)
            return ChatPrompt(
                token_ids,
                use,
                begins_in_reasoning=self._has_reasoning and _begins_in_reasoning(text, messages, chat),
                may_reason=self._has_reasoning and not text.rstrip().endswith(REASONING_CLOSE),
                message_tails=tails,
            )

        expected_s = place.num_bytes * SECONDS_PER_CHAR
        return await self._texts.run(written, place.turn, expected_s=expected_s, is_inline=False)

    async def plan(
        self,
        body: Conversation,
        options: GenerationOptions,
        place: Place,
        check_size: Callable[[int], None],
        run: GrammarReader,
    ) -> ChatPlan:
        """Plans one chat. Raises what ``prompt`` raises, also where calls cannot be forced as is asked.

        Args:
            check_size: see ``prompt``.
            run: makes the grammar, which takes some time where it has calls.
        """
        prompt = await self.prompt(body, place, check_size)
        make_grammar = partial(self._grammar, prompt, options)
        has_calls = prompt.use is not None and prompt.use.has_forced(options.grammar)
        grammar = await run(make_grammar) if has_calls else make_grammar()
        has_own_grammar = grammar is not options.grammar
        # A grammar that could not be put after reasoning holds from the first token on.
        is_bound = grammar is not None and not has_own_grammar
        is_content = (
            grammar is not None and is_bound and not spells_reasoning(grammar, self._tokenizer.added_token_id)
        )
        reading = Reading(
            prompt.use,
            None if prompt.use is None else self._tool_format,
            self._has_reasoning or prompt.channels is not None,
            prompt.begins_in_reasoning and not is_content,
            bool(body.stream),
            prompt.channels and prompt.channels.under(grammar if is_bound else None),
        )
        shown = self._marker_ids if reading.reads_calls or reading.reads_reasoning else frozenset[int]()
        return ChatPlan(
            prompt=prompt.token_ids,
            options=replace(
                options,
                grammar=grammar,
                grammar_field=_TOOLS_FIELD
                if prompt.use is not None and has_own_grammar
                else options.grammar_field,
                shown_token_ids=shown,
                message_tails=prompt.message_tails,
            ),
            reading=reading,
        )

    def _grammar(self, prompt: ChatPrompt, options: GenerationOptions) -> Grammar | None:
        """The grammar of the answer, whose text is to be of another one; that itself where it says all."""
        token_id, begins, text = self._tokenizer.added_token_id, prompt.begins_in_reasoning, options.grammar
        if prompt.channels is not None:
            return forced_channels(prompt.channels, prompt.use, text, field=options.grammar_field)
        if prompt.use is not None:
            return forced_calls(
                prompt.use,
                self._tool_format,
                token_id,
                text=text,
                begins_in_reasoning=begins,
                may_reason=prompt.may_reason,
            )
        if text is None or not (begins or prompt.may_reason):
            return text
        return after_reasoning(text, token_id, begins_in_reasoning=begins) or text

    def _check_tools(self) -> None:
        template = self._tokenizer.chat_template
        if template is not None and not template.reads_tools:
            raise InvalidRequestError(
                "tools are set, but this model's chat template does not show them to the model; "
                "allowed: no tools, or tool_choice none",
                field=_TOOLS_FIELD,
            )


def _begins_in_reasoning(text: str, messages: Sequence[ChatMessage], chat: ChatOptions) -> bool:
    if not chat.continues_final_message:
        return text.rstrip().endswith(REASONING_OPEN)
    final = messages[-1].content or ""
    return final.rfind(REASONING_OPEN) > final.rfind(REASONING_CLOSE)
