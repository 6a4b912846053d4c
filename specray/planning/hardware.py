"""Combines profiles of several kinds of hardware to fleets, with prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specray.config import RouterConfig, SpeculationConfig
from specray.errors import ConfigError
from specray.planning.profile import AcceptanceProfile, DraftProfile, Profile
from specray.planning.simulation.fleet import Kit


@dataclass(frozen=True, slots=True)
class Offer:
    """Targets of one kind with drafts of one kind."""

    kit: Kit
    target_price: float
    """Price of a group with all its devices: USD per hour, or a number of devices where no prices are
    given."""
    draft_price: float

    @property
    def target_hardware(self) -> str:
        return self.kit.target.hardware

    @property
    def draft_hardware(self) -> str | None:
        return None if self.kit.draft is None else self.kit.draft.hardware

    def cost(self, num_groups: int, num_drafts: int) -> float:
        return num_groups * self.target_price + num_drafts * self.draft_price

    def without_draft(self) -> Offer:
        return replace(self, kit=replace(self.kit, draft=None, acceptance=None), draft_price=0.0)


def parse_costs(texts: Sequence[str]) -> dict[str, float]:
    """Reads ``NAME=USD_PER_HOUR``. Raises ConfigError."""
    costs: dict[str, float] = {}
    for text in texts:
        name, separator, price = text.rpartition("=")
        try:
            value = float(price)
        except ValueError:
            value = -1.0
        if not separator or not name or not 0 <= value < float("inf"):
            raise ConfigError(f"--cost is {text!r}; allowed: NAME=USD_PER_HOUR, the price 0 or more")
        costs[name] = value
    return costs


def make_offers(
    profiles: Sequence[Profile],
    costs: Mapping[str, float],
    *,
    temperature: float,
    speculation: SpeculationConfig,
    router_config: RouterConfig,
    network_s: float = 0.0,
) -> list[Offer]:
    """Combines every target with every draft of the same pair of models, and lone targets.

    Args:
        profiles: the measured pairs.
        costs: USD per device and hour, by the hardware's name or a part of it; empty: each device costs 1.
        temperature: temperature of the requests, at which acceptance counts.
        speculation: speculation options of the routers.
        router_config: options of the routers.
        network_s: additional round trip between router and draft in seconds.

    Raises:
        ConfigError: a price fits no hardware, or hardware has no price or several.
    """
    prices = _prices(profiles, costs)
    offers: list[Offer] = []
    for profile in profiles:
        kit = Kit(
            profile.target,
            None,
            None,
            profile.router,
            network_s=network_s,
            router_config=router_config,
            speculation=speculation,
        )
        target_price = profile.target.num_devices * prices[profile.target.hardware]
        drafts = _drafts_for(profile, profiles, temperature)
        offers += [
            Offer(
                replace(kit, draft=draft, acceptance=acceptance),
                target_price,
                draft.num_devices * prices[draft.hardware],
            )
            for draft, acceptance in drafts
        ] or [Offer(kit, target_price, 0.0)]
    return offers


def _drafts_for(
    profile: Profile, profiles: Sequence[Profile], temperature: float
) -> list[tuple[DraftProfile, AcceptanceProfile]]:
    """Returns the drafts for a profile's target: its own, and the same model on other hardware."""
    found: dict[str, tuple[DraftProfile, AcceptanceProfile]] = {}
    for other in (profile, *profiles):
        draft = other.draft
        if draft is None or other.target.model != profile.target.model or draft.hardware in found:
            continue
        if profile.draft is not None and draft.model != profile.draft.model:
            continue
        acceptance = profile.acceptance_at(temperature) or other.acceptance_at(temperature)
        if acceptance is not None:
            found[draft.hardware] = draft, acceptance
    return list(found.values())


def _prices(profiles: Sequence[Profile], costs: Mapping[str, float]) -> dict[str, float]:
    engines = [
        engine for profile in profiles for engine in (profile.target, profile.draft) if engine is not None
    ]
    names = sorted({engine.hardware for engine in engines})
    if not costs:
        return dict.fromkeys(names, 1.0)
    for part in costs:
        if not any(part.lower() in name.lower() for name in names):
            raise ConfigError(f"--cost {part}: no profile has such hardware; there is: {'; '.join(names)}")
    return {name: _price_of(name, costs) for name in names}


def _price_of(name: str, costs: Mapping[str, float]) -> float:
    if name in costs:
        return costs[name]
    fitting = [part for part in costs if part.lower() in name.lower()]
    if len(fitting) != 1:
        reason = "there is no --cost for it" if not fitting else f"it is named by {' and '.join(fitting)}"
        raise ConfigError(f"--cost: hardware {name!r} needs one price; {reason}")
    return costs[fitting[0]]
