"""A fleet in virtual time: real routers over simulated engines.

Where ``router.routing`` is ``prefix`` the service's own code chooses the router of a request; else it is the
less loaded of two drawn at random, as with Serve (power of two choices). A router leases the draft that the
fewest routers have.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import Final

from specray.config import RouterConfig, SpeculationConfig
from specray.errors import OverloadedError
from specray.fakes import VirtualClock
from specray.planning.load import FixedLength, Lengths, SharedPrefixes
from specray.planning.profile import AcceptanceProfile, DraftProfile, RouterProfile, TargetProfile
from specray.planning.simulation.draft import SimulatedDraft, SimulatedDrafterSource
from specray.planning.simulation.prefixes import PrefixCache
from specray.planning.simulation.quiet_metrics import QuietMetrics
from specray.planning.simulation.results import SimulatedRequest
from specray.planning.simulation.scripts import VOCAB_SIZE, ReplayedScript, Scripts
from specray.planning.simulation.target import RequestTimes, SimulatedTarget
from specray.planning.simulation.times import SimulatedDraftTimes, SimulatedTargetTimes
from specray.requests import GenerateRequest, OutputChunk
from specray.router import Router
from specray.routing import RouterChoice
from specray.types import DraftKind, SamplingParams

_FIRST_OWN: Final = 1 << 28
"""First of the tokens that end what a prompt shares with others."""


@dataclass(frozen=True, slots=True)
class Kit:
    """The parts of a fleet."""

    target: TargetProfile
    draft: DraftProfile | None
    acceptance: AcceptanceProfile | None
    router: RouterProfile = field(default_factory=RouterProfile)
    network_s: float = 0.0
    """Additional round trip between router and draft in seconds."""
    shares_hardware: bool = False
    """True if draft and target of a group slow each other down as in the measurement."""
    router_config: RouterConfig = field(default_factory=lambda: RouterConfig.model_validate({}))
    speculation: SpeculationConfig = field(default_factory=lambda: SpeculationConfig.model_validate({}))
    is_replay: bool = False
    """True if requests are the measured ones, in turns, with their prompts."""
    draft_kind: DraftKind = DraftKind.MODEL
    """What drafts where a request does not say."""


@dataclass(slots=True, eq=False)
class _Group:
    router: Router
    target: SimulatedTarget
    num_requests: int = 0
    """Requests under way."""
    num_sent: int = 0
    """Requests so far."""


class Fleet:
    """Routers and engines, and their requests."""

    def __init__(
        self,
        kit: Kit,
        clock: VirtualClock,
        num_groups: int,
        num_drafts: int,
        seed: int,
        *,
        has_prefixes: bool = False,
    ) -> None:
        self._choice: RouterChoice | None = None
        if has_prefixes and num_groups > 1 and kit.router_config.routing == "prefix":
            self._choice = RouterChoice(clock.monotonic, seed=seed)
        self._rng = random.Random(f"{seed}-fleet")
        self.clock = clock
        self._requests: dict[str, RequestTimes] = {}
        self._num_sent = 0
        self._max_model_len = kit.target.max_model_len
        self._scripts = Scripts(kit.acceptance, seed=seed, is_in_order=kit.is_replay)
        self._is_replay = kit.is_replay
        draft_profile = kit.draft
        hardware = ("shared",) if kit.shares_hardware else ()
        if draft_profile is not None:
            self._max_model_len = min(self._max_model_len, draft_profile.max_model_len)
            times = SimulatedDraftTimes(draft_profile, network_s=kit.network_s)
            info = replace(
                draft_profile.info("draft"),
                vocab_size=VOCAB_SIZE,
                hardware=hardware,
                lacks_outcomes=not draft_profile.outcomes,
            )
            self.drafts = [
                SimulatedDraft(
                    info, times, router=kit.router, scripts=self._scripts, seed=f"{seed}-draft-{index}"
                )
                for index in range(num_drafts)
            ]
        else:
            self.drafts = []
        target_times = SimulatedTargetTimes(kit.target)
        source = SimulatedDrafterSource(self.drafts) if self.drafts else None
        speculation = kit.speculation
        if not self._scripts.outputs:
            # Tokens are made up: a proposer that looks for repetitions would find nothing else.
            speculation = speculation.model_copy(update={"fallback": "none"})
        self.groups = []
        for index in range(num_groups):
            target = SimulatedTarget(
                replace(kit.target.info("target"), vocab_size=VOCAB_SIZE, hardware=hardware),
                target_times,
                router=kit.router,
                scripts=self._scripts,
                rng=random.Random(f"{seed}-target-{index}"),
                requests=self._requests,
                prefixes=PrefixCache(kit.target.info("target")) if has_prefixes else None,
            )
            if kit.shares_hardware and self.drafts:
                draft = self.drafts[index % len(self.drafts)]
                target.beside, draft.beside = draft.busy, target.busy
            router = Router(
                target,
                source,
                router=kit.router_config,
                speculation=speculation,
                clock=clock,
                metrics=QuietMetrics(),
                draft=kit.draft_kind,
                seed=index,
            )
            self.groups.append(_Group(router, target))

    async def start(self) -> None:
        """Connects the routers, which lease drafts."""
        for group in self.groups:
            await group.router.start()

    async def stop(self) -> None:
        """Ends every request and router."""
        await asyncio.gather(*(group.router.stop() for group in self.groups))

    async def serve(
        self,
        prompt: Lengths,
        output: Lengths,
        rng: random.Random,
        temperature: float,
        prefixes: SharedPrefixes | None = None,
    ) -> SimulatedRequest:
        """Serves one request, from its arrival to its end."""
        self._num_sent += 1
        request_id = f"request-{self._num_sent}"
        script = self._scripts.of(request_id)
        num_output = output.draw(rng, self._max_model_len - 1)
        if self._is_replay and isinstance(script, ReplayedScript):
            prompt = FixedLength(script.num_prompt_tokens)
        num_prompt = prompt.draw(rng, self._max_model_len - num_output)
        token_ids = script.prompt(num_prompt)
        if prefixes is not None:
            shared = prefixes.draw(rng, num_prompt - 1)
            # What follows is nobody else's.
            token_ids = (*shared, _FIRST_OWN + self._num_sent, *token_ids[len(shared) + 1 :])
        sampling = SamplingParams(temperature=temperature, num_prompt_tokens=num_prompt)
        return await self.send(GenerateRequest(request_id, token_ids, sampling, num_output))

    async def send(self, request: GenerateRequest) -> SimulatedRequest:
        """Sends one request to the router that is chosen for it, and returns at its end."""
        num_prompt = len(request.prompt_token_ids)
        times = self._requests[request.request_id] = RequestTimes()
        arrived_s = self.clock.monotonic()
        group = self._choose(request)
        group.num_requests += 1
        group.num_sent += 1
        try:
            output = await self._output(group, request)
        except OverloadedError:
            return SimulatedRequest(arrived_s, num_prompt, request.max_tokens)
        finally:
            group.num_requests -= 1
        return SimulatedRequest(
            arrived_s,
            num_prompt,
            request.max_tokens,
            times.first_s,
            self.clock.monotonic(),
            num_cached_tokens=output.num_cached_tokens,
            token_ids=output.token_ids,
        )

    async def _output(self, group: _Group, request: GenerateRequest) -> OutputChunk:
        """The whole output, of which the choice hears as an Ingress does."""
        if self._choice is None:
            return await group.router.complete(request)
        token_ids: list[int] = []
        error: Exception | None = None
        try:
            async for chunk in group.router.stream(request):
                token_ids.extend(chunk.token_ids)
                self._choice.on_chunk(chunk, token_ids)
        except OverloadedError as refusal:
            error = refusal
            raise
        finally:
            self._choice.on_end(request.request_id, error)
        return replace(chunk, token_ids=tuple(token_ids))

    def gaps(self, since_s: float, until_s: float) -> list[tuple[float, float]]:
        """Returns weighted inter-token latencies in seconds of requests that ended in an interval."""
        return [
            (gap, float(count))
            for times in self._requests.values()
            if since_s <= times.last_s <= until_s
            for gap, count in times.gaps
        ]

    def num_tokens(self) -> int:
        """Output tokens so far."""
        return sum(times.num_tokens for times in self._requests.values())

    def busy_s(self) -> tuple[float, float]:
        """Seconds worked so far by targets and by drafts."""
        now = self.clock.monotonic()
        targets = sum(group.target.busy.worked_s(now) for group in self.groups)
        return targets, sum(draft.busy.worked_s(now) for draft in self.drafts)

    def num_rounds(self) -> int:
        """Verdicts that committed tokens."""
        return sum(len(times.gaps) + (times.first_s is not None) for times in self._requests.values())

    def _choose(self, request: GenerateRequest) -> _Group:
        if len(self.groups) == 1:
            return self.groups[0]
        if self._choice is not None:
            names = [str(index) for index in range(len(self.groups))]
            return self.groups[int(self._choice.choose(request, names)[0])]
        one, other = self._rng.sample(self.groups, 2)
        return one if one.num_requests <= other.num_requests else other
