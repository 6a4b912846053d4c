"""Injects faults: one function per kind, which also ends the fault where it does not end by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specray.bench.load.client import ServerClient
from specray.bench.soak.adapters import churn
from specray.bench.soak.models import churn_model
from specray.bench.soak.neighbours import RAY_PARTS, lose_ray, send_endless_head, start_on_taken_ports
from specray.bench.soak.schedule import FaultKind, PlannedFault
from specray.bench.testbed.beds import Bed
from specray.bench.testbed.models import draft_path, make_other_model
from specray.bench.testbed.parts import Part, PartRole, of_role
from specray.errors import EngineLostError, SpecrayError
from specray.rpc.inference.client import SpecrayClient

DELAY_MS = 40.0
"""Delay of a slow cable in milliseconds, each way."""
LOSS = 0.1
"""Share of the frames that a bad cable loses."""
OTHER_DRAFT = "other-draft"
CHURN_TIMEOUT_S = 60.0
NEW_DRAFT_TIMEOUT_S = 30.0
"""Seconds for the Router to use a draft's new model."""


@dataclass(frozen=True, slots=True)
class Done:
    what: str
    killed: frozenset[int] = frozenset()
    """Ids of processes that do not come back, though the service may not have noticed yet."""


Injector = Callable[[Bed, PlannedFault, random.Random], Awaitable[Done]]


async def prepare(bed: Bed, kinds: Collection[FaultKind]) -> None:
    """Prepares what these kinds need and what would hold up this process's clients later.

    Raises:
        EngineLostError: it could not be made.
    """
    if FaultKind.DRAFT_UPGRADE in kinds:
        await asyncio.to_thread(_other_draft, bed)


async def inject(bed: Bed, fault: PlannedFault, rng: random.Random) -> Done:
    """Injects a fault, and ends it when its time is over. ``prepare`` must have run.

    Raises:
        EngineLostError: there was nobody to do it to, or it could not be done.
    """
    return await _INJECTORS[fault.kind](bed, fault, rng)


async def _kill(role: PartRole, bed: Bed, fault: PlannedFault, rng: random.Random) -> Done:
    part = await _pick(bed, role, rng)
    _signal(part, signal.SIGKILL)
    return Done(f"{role} {part.pid}", frozenset({part.pid}))


async def _stop(
    role: PartRole, last: signal.Signals, bed: Bed, fault: PlannedFault, rng: random.Random
) -> Done:
    """Stops a process for a while; ``last`` continues or kills it."""
    part = await _pick(bed, role, rng)
    _signal(part, signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.hold_s)
    finally:
        # The process may have ended in the meantime.
        with contextlib.suppress(EngineLostError):
            _signal(part, last)
    return Done(f"{role} {part.pid}", frozenset({part.pid} if last is signal.SIGKILL else ()))


async def _hang_ingress(bed: Bed, fault: PlannedFault, rng: random.Random) -> Done:
    """Returns at once: that it is stopped is for Serve to notice."""
    part = await _pick(bed, PartRole.INGRESS, rng)
    _signal(part, signal.SIGSTOP)
    return Done(f"ingress {part.pid}", frozenset({part.pid}))


async def _partition(bed: Bed, fault: PlannedFault, rng: random.Random) -> Done:
    assert bed.link is not None, "a partition needs a cable"
    await bed.link.set_up(False)
    try:
        await asyncio.sleep(fault.hold_s)
    finally:
        await bed.link.set_up(True)
    return Done("the draft's host")


async def _impair(
    delay_ms: float, loss: float, what: str, bed: Bed, fault: PlannedFault, rng: random.Random
) -> Done:
    assert bed.link is not None, "a bad cable needs a cable"
    await bed.link.impair(delay_ms, loss)
    try:
        await asyncio.sleep(fault.hold_s)
    finally:
        await bed.link.impair(0.0, 0.0)
    return Done(f"the draft's host, {what}")


async def _neighbour(
    start: Callable[[Bed, random.Random], Awaitable[str]], bed: Bed, fault: PlannedFault, rng: random.Random
) -> Done:
    return Done(await start(bed, rng))


async def _remove_node(bed: Bed, fault: PlannedFault, rng: random.Random) -> Done:
    assert bed.nodes is not None, "a lost node needs a second one"
    drafts = of_role(await bed.control.parts(), PartRole.DRAFT)
    await bed.nodes.remove()
    await asyncio.sleep(fault.hold_s)
    await bed.nodes.join()
    return Done("the draft's node", frozenset(part.pid for part in drafts))


async def _drain_node(bed: Bed, fault: PlannedFault, rng: random.Random) -> Done:
    assert bed.nodes is not None, "a drained node needs a second one"
    draft = await _pick(bed, PartRole.DRAFT, rng)
    await bed.nodes.replace(bed.control, draft.node_id)
    return Done("the draft's node", frozenset({draft.pid}))


async def _upgrade_draft(bed: Bed, fault: PlannedFault, rng: random.Random) -> Done:
    own, other = draft_path(bed.config.draft), _other_draft(bed)
    async with SpecrayClient(bed.grpc_address) as client:
        model = own if await _draft_in_use(client) == other.name else other
        await bed.control.call("upgrade", str(model))
        end_s = time.monotonic() + NEW_DRAFT_TIMEOUT_S
        while await _draft_in_use(client) != model.name:
            if time.monotonic() > end_s:
                raise EngineLostError(
                    f"the Router uses no draft {model.name} after {NEW_DRAFT_TIMEOUT_S:g} s"
                )
            await asyncio.sleep(0.5)
    return Done(f"the draft is {model.name}")


def _other_draft(bed: Bed) -> Path:
    return make_other_model(draft_path(bed.config.draft), bed.directory / OTHER_DRAFT)


async def _draft_in_use(client: SpecrayClient) -> str | None:
    """Returns the name of the draft's model; None: there is no draft now."""
    with contextlib.suppress(SpecrayError):
        return (await client.info()).draft_model
    return None


async def _pick(bed: Bed, role: PartRole, rng: random.Random) -> Part:
    parts = of_role(await bed.control.parts(), role)
    if not parts:
        raise EngineLostError(f"the service has no {role} now")
    return rng.choice(parts)


def _signal(part: Part, number: signal.Signals) -> None:
    try:
        os.kill(part.pid, number)
    except ProcessLookupError:
        raise EngineLostError(f"{part.role} {part.pid} had already ended") from None


async def _churn(bed: Bed) -> str:
    async with ServerClient(bed.url, timeout_s=CHURN_TIMEOUT_S) as http:
        return await churn(http)


async def _churn_model(bed: Bed, rng: random.Random) -> str:
    # For each, as long as the service itself allows.
    async with ServerClient(bed.url, timeout_s=bed.config.router.start_timeout_s) as http:
        return await churn_model(http, rng.choice(bed.config.models).name)


_INJECTORS: dict[FaultKind, Injector] = {
    FaultKind.DRAFT_KILL: partial(_kill, PartRole.DRAFT),
    FaultKind.DRAFT_STOP: partial(_stop, PartRole.DRAFT, signal.SIGCONT),
    FaultKind.DRAFT_HANG: partial(_stop, PartRole.DRAFT, signal.SIGKILL),
    FaultKind.DRAFT_PARTITION: _partition,
    FaultKind.DRAFT_DELAY: partial(_impair, DELAY_MS, 0.0, f"{DELAY_MS:g} ms each way"),
    FaultKind.DRAFT_LOSS: partial(_impair, 0.0, LOSS, f"{100 * LOSS:g} % of frames"),
    FaultKind.TARGET_KILL: partial(_kill, PartRole.TARGET),
    FaultKind.TARGET_STOP: partial(_stop, PartRole.TARGET, signal.SIGCONT),
    FaultKind.ROUTER_KILL: partial(_kill, PartRole.ROUTER),
    FaultKind.NODE_REMOVE: _remove_node,
    FaultKind.NODE_DRAIN: _drain_node,
    FaultKind.DRAFT_UPGRADE: _upgrade_draft,
    FaultKind.INGRESS_HANG: _hang_ingress,
    FaultKind.CONTROLLER_KILL: partial(_kill, PartRole.CONTROLLER),
    FaultKind.RAY_LOST: partial(_neighbour, lambda bed, rng: lose_ray(rng.choice(RAY_PARTS), bed.directory)),
    FaultKind.SECOND_SERVICE: partial(_neighbour, lambda bed, rng: start_on_taken_ports(bed)),
    FaultKind.ENDLESS_HEAD: partial(
        _neighbour, lambda bed, rng: send_endless_head(bed.config.http.host, bed.config.http.port)
    ),
    FaultKind.ADAPTER_CHURN: partial(_neighbour, lambda bed, rng: _churn(bed)),
    FaultKind.MODELS_KILL: partial(_kill, PartRole.MODELS),
    FaultKind.MODEL_CHURN: partial(_neighbour, _churn_model),
}
