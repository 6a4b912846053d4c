"""The Router's main loops, serial and overlapped: the order in which the calls of ``rounds`` are made.

``serial_loop`` is the reference: propose for all, wait, verify all, commit. ``overlapped_loop`` is event
driven: whenever something happened it takes one step, and what is in flight on the target is the argument
and the result of that step. At most one Verify is in flight; while it is, the draft works on its outcomes.
A hit makes a session ready at once; a miss asks for a fresh proposal, or none when that would not pay.

With K = 0 for all sessions both are plain continuous batching and the draft is not touched. When the control
asks for the other loop, the running one ends after its round in flight, and sessions go on in the other.
"""

from __future__ import annotations

from specray.router.in_flight import VerifyInFlight
from specray.router.rounds import Rounds


async def serve_rounds(rounds: Rounds) -> None:
    """Runs the loop that is asked for, now and whenever that changes, until ``rounds`` is closed."""
    while rounds.is_open:
        await (serial_loop(rounds) if rounds.is_serial else overlapped_loop(rounds))
        # What the one has left to do, the other must not wait for.
        rounds.wake()


async def serial_loop(rounds: Rounds) -> None:
    """Draft and target take turns. Ends when ``rounds`` is closed, or both are to overlap."""
    while rounds.is_open and rounds.is_serial:
        await rounds.wait(None)
        while rounds.is_serial and await serial_step(rounds):
            pass


async def serial_step(rounds: Rounds) -> bool:
    """One round of all sessions. False: nothing was to be done."""
    rounds.collect(None)
    rounds.admit()
    rounds.propose()
    rounds.flush()
    while rounds.is_open and rounds.is_waiting_for_draft():
        await rounds.wait(None)
        rounds.collect(None)
        rounds.propose()
        rounds.flush()
    batch = rounds.schedule(has_grace=False)
    if not rounds.is_open or not batch:
        return False
    verifying: VerifyInFlight | None = rounds.verify(batch)
    rounds.prefill_draft(verifying)
    rounds.flush()
    while rounds.is_open and verifying is not None:
        await rounds.wait(verifying)
        verifying = rounds.collect(verifying)
        if verifying is not None:
            # Nobody's round has ended: what is left are releases, and draft prefill of new sessions.
            rounds.flush()
    return True


async def overlapped_loop(rounds: Rounds) -> None:
    """Draft and target work at the same time. Ends when ``rounds`` is closed, or both are to take turns."""
    verifying: VerifyInFlight | None = None
    while rounds.is_open and (verifying is not None or not rounds.is_serial):
        await rounds.wait(verifying)
        if rounds.is_serial:
            verifying = rounds.collect(verifying)
            rounds.flush()
        else:
            verifying = overlapped_step(rounds, verifying)


def overlapped_step(rounds: Rounds, verifying: VerifyInFlight | None) -> VerifyInFlight | None:
    """Takes in what happened and keeps both engines busy. Takes and returns the Verify in flight."""
    verifying = rounds.collect(verifying)
    rounds.admit()
    rounds.propose()
    if verifying is None:
        batch = rounds.schedule(has_grace=True)
        if batch:
            verifying = rounds.verify(batch)
            rounds.draft_ahead(verifying)
    rounds.prefill_draft(verifying)
    rounds.flush()
    return verifying
