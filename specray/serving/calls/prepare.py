"""Prepares every call, whatever API it came through, in one order.

The limits of key and service were asked before the body was read (``admission.places``). Then: the model,
every option, what the routers are known to refuse, the size of the prompts, the key's quota by an estimate
from the body's bytes, the grammar, the tokens, the quota again, exactly. All of it ends by the deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from specray.config.live import LiveConfig
from specray.grammar import PreparedCompiler
from specray.requests import AdapterRef, GenerateRequest
from specray.serving.admission.capacity import Admission
from specray.serving.admission.limiter import step_aside
from specray.serving.admission.places import Place
from specray.serving.admission.texts import SECONDS_PER_BYTE, SECONDS_PER_CHAR
from specray.serving.calls.chat_plan import ChatPlanner, Conversation, Reading
from specray.serving.calls.defaults import load_defaults
from specray.serving.calls.generate_requests import to_generate_requests, truncated
from specray.serving.calls.grammars import GrammarChecker
from specray.serving.calls.limits import ServiceLimits
from specray.serving.calls.option_texts import with_bad_word_ids, with_prediction_ids
from specray.serving.calls.prompts import Prompt, encode_prompts
from specray.serving.validation import (
    GenerationOptions,
    Limits,
    check_options,
    check_sizes,
)
from specray.tokenization import Tokenizer

DEADLINE_MARGIN_S: Final = 15.0
"""Seconds past a request's deadline, which the router keeps, after which the ingress gives up on it."""
_BYTES_PER_TOKEN: Final = 8
"""Bytes of a body by which its tokens are estimated: more than text has, so that nobody is refused for it."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Asked:
    model: str | None
    prompts: Sequence[Prompt] | Conversation
    """Texts or token ids, or one conversation."""
    options: Callable[[], GenerationOptions]
    """Reads the options. Raises InvalidRequestError."""
    timeout_s: float | None = None
    grammar_field: str | None = None
    """Name of a field that may ask for a grammar, which can take long to read; None: there is none."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that may go to the routers."""

    requests: list[GenerateRequest]
    """One for each prompt and choice, under the key's policy."""
    prompts: list[tuple[int, ...]]
    options: GenerationOptions
    limits: Limits
    reading: Reading | None
    """How a chat's answers are read; None: the call is no chat."""
    timeout_s: float
    """Seconds after which the ingress gives up on the routers."""


async def read_in_turn(work: Callable[[], ResultT], place: Place, admission: Admission) -> ResultT:
    """Returns what ``work`` reads of a call's body; a long one is read in a thread.

    Raises:
        OverloadedError, DeadlineExceededError: too many texts of others go first.
    """
    expected_s = place.num_bytes * SECONDS_PER_BYTE
    return await admission.texts.run(work, place.turn, expected_s=expected_s)


class CallPreparer:
    """Prepares the calls of one Ingress.

    Args:
        admission: has the threads that all endpoints share.
        tokenizer: the target's.
        compiler: of grammars.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        tokenizer: Tokenizer,
        config: LiveConfig,
        limits: ServiceLimits,
        compiler: PreparedCompiler,
    ) -> None:
        self._admission = admission
        self._tokenizer = tokenizer
        self._limits = limits
        self._grammars = GrammarChecker(compiler)
        self._planner = ChatPlanner(tokenizer, config, admission.texts)
        self._defaults = load_defaults(config.now)

    async def read(self, work: Callable[[], ResultT], place: Place) -> ResultT:
        """See ``read_in_turn``."""
        return await read_in_turn(work, place, self._admission)

    async def work(self, work: Callable[[], ResultT], place: Place, *, size: int | None = None) -> ResultT:
        """Returns what ``work`` on the tokens of a call returns; on many, it is done in a thread.

        Args:
            size: characters; default: the bytes of the body.

        Raises:
            OverloadedError, DeadlineExceededError: too many texts of others go first.
        """
        num_chars = place.num_bytes if size is None else size
        return await self._admission.texts.run(work, place.turn, expected_s=num_chars * SECONDS_PER_CHAR)

    async def prepare(self, asked: Asked, place: Place, *, request_id: str) -> PreparedCall:
        """Makes a call's requests.

        Args:
            request_id: prefix of the requests' ids; unique.

        Raises:
            InvalidRequestError, ModelNotFoundError: the call is wrong.
            OverloadedError: its key or the service has too much in hand.
            DeadlineExceededError: its time is over.
            EngineLostError: no router says what it serves.
        """
        if asked.timeout_s is not None and asked.timeout_s > 0:
            place.limit(asked.timeout_s)
        async with place.in_time():
            limits = await self._limits.get()
            place.caller.check_model(limits.model_name)
            ref = await self.adapter_of(asked.model)
            options = await self._admitted(asked, limits, place)
            if options.adapter:
                ref = await self.adapter_of(asked.model, options.adapter)
            if ref is not None:
                options = replace(options, adapter_ref=ref)
                limits = replace(limits, model_name=ref.name)
            options, prompts, reading = await self._tokenized(asked, options, limits, place)
        remaining_s = place.remaining_s
        if options.timeout_s is not None:
            options = replace(options, timeout_s=remaining_s)
        requests = to_generate_requests(prompts, options, limits=limits, request_id=request_id)
        place.quota.claim([len(request.prompt_token_ids) for request in requests])
        place.release_body()
        requests = place.caller.apply_policy(requests)
        return PreparedCall(requests, prompts, options, limits, reading, remaining_s + DEADLINE_MARGIN_S)

    async def adapter_of(self, model: str | None, adapter: str = "") -> AdapterRef | None:
        """See ``AdapterCatalog.find``."""
        return await self._admission.adapters.find(model, adapter)

    async def options(self, asked: Asked, place: Place) -> GenerationOptions:
        if asked.grammar_field is None:
            return asked.options()
        step_aside()
        return await self._grammars.read(asked.options, field=asked.grammar_field, turn=place.turn)

    async def chat_tokens(self, body: Conversation, place: Place) -> tuple[int, ...]:
        return (await self._planner.prompt(body, place)).token_ids

    async def _admitted(self, asked: Asked, limits: Limits, place: Place) -> GenerationOptions:
        options = self._defaults.apply(await self.options(asked, place))
        check_options(options, limits)
        self._admission.capacity.check(*place.caller.standing(options.tenant, options.priority or 0))
        num_prompts = 1
        if isinstance(asked.prompts, Sequence):
            least = [self._least_tokens(prompt) for prompt in asked.prompts]
            check_sizes(least, options, limits, least=True)
            num_prompts = len(least)
        num_tokens = 1 + place.num_bytes // _BYTES_PER_TOKEN // num_prompts
        place.quota.claim([num_tokens] * num_prompts * (options.n or 1))
        await self._check_grammar(options, limits, place)
        return options

    async def _tokenized(
        self, asked: Asked, options: GenerationOptions, limits: Limits, place: Place
    ) -> tuple[GenerationOptions, list[tuple[int, ...]], Reading | None]:
        def with_ids() -> GenerationOptions:
            return with_prediction_ids(with_bad_word_ids(options, self._tokenizer), self._tokenizer, limits)

        num_chars = len(options.prediction) + sum(map(len, options.bad_words))
        options = await self.work(with_ids, place, size=num_chars)
        asks_for = asked.prompts
        if not isinstance(asks_for, Sequence):
            plan = await self._planner.plan(
                asks_for,
                options,
                place,
                lambda size: check_sizes([size], options, limits, least=True),
                partial(self._grammars.read, field="tools", turn=place.turn),
            )
            if plan.options.grammar is not options.grammar:
                await self._check_grammar(plan.options, limits, place)
            return plan.options, truncated([plan.prompt], options, limits), plan.reading
        num_chars = sum(len(prompt) for prompt in asks_for if isinstance(prompt, str))
        token_ids = await self.work(lambda: encode_prompts(asks_for, self._tokenizer), place, size=num_chars)
        return options, truncated(token_ids, options, limits), None

    async def _check_grammar(self, options: GenerationOptions, limits: Limits, place: Place) -> None:
        if options.grammar is not None:
            step_aside()
            await self._grammars.check(
                options.grammar, field=options.grammar_field, limits=limits, turn=place.turn
            )

    def _least_tokens(self, prompt: Prompt) -> int:
        return self._tokenizer.least_tokens(prompt) if isinstance(prompt, str) else len(prompt)
