"""The toy model with a recurrent layer, whose state is the list of all tokens that it has seen."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specray.engine.cache.state_slots import DRAFT_OPEN_ROWS, MAX_OPEN_ROWS, STATE_UNIT, StateSlots
from specray.engine.drafting.engine import DraftEngine
from specray.engine.inputs import SequenceInput, StateCopy
from specray.engine.step import ForwardOutput, SequenceRows
from specray.engine.target.engine import TargetEngine
from specray.engine_info import EngineInfo
from specray.types import SamplingParams, Verdict, VerifyItem
from tests.unit.engine.harness import CLOSE, CPU, TARGET, SlotRunner, engine_info


class StateRunner(SlotRunner):
    """Whoever goes on from a state of other tokens than those of its keys and values fails."""

    def __init__(
        self, rows: Tensor, info: EngineInfo, *, num_snapshots: int, max_open: int = MAX_OPEN_ROWS
    ) -> None:
        super().__init__(rows, info)
        self.slots_of_states = StateSlots(info.max_num_seqs + 1, max_open, num_snapshots)
        self.states = self.slots_of_states
        self.seen: dict[int, list[int]] = {}
        """Tokens in the state and the records of a slot."""
        self.kept: dict[int, list[int]] = {}
        """Tokens in a snapshot."""
        self.fails = False
        """Whether the next step does, once it has begun."""

    def run(self, inputs: Sequence[SequenceInput]) -> ForwardOutput:
        rows = [
            SequenceRows(
                0, len(item.token_ids), item.start, [], (), item.state_slot, item.num_open, item.marks
            )
            for item in inputs
        ]
        bases = self.slots_of_states.begin(rows)
        for item, row, base in zip(inputs, rows, bases, strict=True):
            before = self.seen.pop(item.state_slot, [])[: item.start] if item.start else []
            slots = self._slots(item.block_ids, item.start)
            assert before == [self.slots[slot] for slot in slots], "the state has seen other tokens"
            if self.fails:
                continue
            seen = self.seen[item.state_slot] = [*before, *item.token_ids]
            assert base <= item.start
            for end, snapshot in item.marks:
                assert item.start < end <= row.settled and end % STATE_UNIT == 0
                self.kept[snapshot] = seen[:end]
        if self.fails:
            self.fails = False
            raise ZeroDivisionError
        output = super().run(inputs)
        self.slots_of_states.finish(rows)
        return output

    def advance(self, kept: Sequence[int], token_ids: Sequence[int]) -> ForwardOutput | None:
        return None

    def copy_state(self, copy: StateCopy) -> None:
        if copy.base is None:
            slots = self.slots_of_states
            slots.bases[copy.slot] = slots.ends[copy.slot] = copy.num_tokens
            self.seen[copy.slot] = list(self.kept[copy.snapshot])
            assert len(self.kept[copy.snapshot]) == copy.num_tokens
            return
        assert copy.base == self.slots_of_states.bases[copy.slot] > 0
        assert copy.base <= copy.num_tokens <= self.slots_of_states.ends[copy.slot]
        self.kept[copy.snapshot] = self.seen[copy.slot][: copy.num_tokens]


def state_target(
    *, num_snapshots: int = 16, prefix_cache: bool = True, **sizes: int
) -> tuple[TargetEngine, StateRunner]:
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 256, "block_size": 16, **sizes}
    sizes.setdefault("num_blocks", 6144 // sizes["block_size"])
    info = engine_info("target", **sizes)
    runner = StateRunner(TARGET, info, num_snapshots=num_snapshots)
    return TargetEngine(runner, info, device=CPU, prefix_cache=prefix_cache), runner


def state_draft(
    rows: Tensor = CLOSE, *, num_snapshots: int = 0, **sizes: int
) -> tuple[DraftEngine, StateRunner]:
    info = engine_info("draft", **sizes)
    runner = StateRunner(rows, info, num_snapshots=num_snapshots, max_open=DRAFT_OPEN_ROWS)
    return DraftEngine(runner, info, device=CPU), runner


def first_token(
    target: TargetEngine, name: str, prompt: Sequence[int], borders: Sequence[int] = ()
) -> Verdict:
    """The verdict of a prompt, whose request is released."""
    sampling = SamplingParams(temperature=0.0, num_prompt_tokens=len(prompt), message_borders=tuple(borders))
    [reply] = target.verify([VerifyItem(name, 1, 0, tuple(prompt), sampling=sampling)]).replies
    assert isinstance(reply, Verdict), reply
    target.release([name])
    target.check_integrity()
    return reply
