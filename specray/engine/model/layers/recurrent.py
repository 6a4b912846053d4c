"""Recurrent layers of the library's models: run for each sequence of a step, with states that are kept.

All rows of a step pass through the model side by side. A recurrent layer (linear attention, Mamba, short
convolutions) must see the rows of each sequence alone, after the state of that sequence. So its module is
called for pieces of sequences, each of which ends where a state is to be kept; pieces of one length are a
batch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from specray.engine.cache.blocks import BlockCache
from specray.engine.cache.states import LayerState, State, StateCache
from specray.engine.step import AttentionStep, SequenceRows
from specray.errors import ConfigError

_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
"""Names under which modules of the library take their cache."""


class LayerCache:
    """What a recurrent module takes for its cache: the state of its layer after tokens of sequences."""

    def __init__(self, state: LayerState) -> None:
        self.state = state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Last inputs; None: there were none. The module may write to them."""
        return self.state.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The state; None: the sequence begins. The module may write to it."""
        return self.state.recurrent.get(state_idx)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Takes inputs ``[batch, channels, tokens]``, and returns them after the last ones."""
        before = self.state.conv.get(state_idx)
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        joined = conv_states if before is None else torch.cat((before, conv_states), dim=-1)
        if joined.shape[-1] < size:
            joined = torch.nn.functional.pad(joined, (size - joined.shape[-1], 0))
        self.state.conv[state_idx] = joined[..., -size:]
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self.state.recurrent[state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.state.conv or self.state.recurrent)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether all inputs are wanted: never."""
        return False


@dataclass(slots=True)
class _RecurrentSequence:
    """The states of one sequence, by number of tokens and layer."""

    rows: SequenceRows
    before: State | None
    """States after the tokens before the step; None: there are no such tokens."""
    after: dict[int, dict[int, LayerState]] = field(default_factory=dict)
    """States after each piece, by number of tokens and layer."""


class _RowRun(NamedTuple):
    """Rows of a step that a recurrent layer sees at once."""

    sequence: _RecurrentSequence
    first: int
    last: int
    """Row after the last one."""
    start: int
    """Tokens of the sequence before."""

    @property
    def end(self) -> int:
        """Tokens of the sequence with them, after which the state is kept."""
        return self.start + self.last - self.first

    @property
    def kind(self) -> tuple[int, bool]:
        """What the pieces of a batch have in common: their length, and whether there is a state before."""
        return self.last - self.first, self.start > 0

    def state_of(self, layer: int) -> LayerState:
        sequence = self.sequence
        if self.start == 0:
            return LayerState()
        if self.start == sequence.rows.start:
            assert sequence.before is not None, "a state is kept behind the tokens before"
            return sequence.before[layer]
        return sequence.after[self.start][layer]


class RecurrentLayers:
    """The recurrent modules of a model, each of which now runs sequence by sequence.

    Args:
        modules: in the order in which they run.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._batches: list[list[_RowRun]] = []
        for number, module in enumerate(modules):
            module.forward = partial(self._run, number, module.forward, _cache_argument(module))

    @contextlib.contextmanager
    def over(self, step: AttentionStep) -> Iterator[None]:
        """Runs the model's next forward with the rows of a step, and keeps the states that it leads to."""
        cache = step.cache
        assert isinstance(cache, BlockCache), "states are kept beside blocks"
        assert not any(rows.visibility for rows in step.rows), "recurrent layers see chains alone"
        states = cache.states
        assert isinstance(states, StateCache), "the library's layers have states alone"
        sequences = [_RecurrentSequence(rows, states.state_before(rows)) for rows in step.rows]
        self._batches = _batches(sequences)
        try:
            yield
            for sequence in sequences:
                states.keep(sequence.rows, sequence.after)
        finally:
            self._batches = []

    def _run(
        self,
        layer: int,
        inner: Callable[..., Any],
        cache_name: str,
        hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self._batches:
            return inner(hidden_states, *args, **kwargs)
        if args:
            raise ConfigError("the model is not supported: its recurrent layers are called in an own way")
        kwargs.pop("attention_step", None)
        outputs: dict[int, torch.Tensor] = {}
        for pieces in self._batches:
            cache = LayerCache(LayerState.joined([piece.state_of(layer) for piece in pieces]))
            kwargs[cache_name] = cache
            rows = torch.cat([hidden_states[:, piece.first : piece.last] for piece in pieces])
            output = inner(rows, **kwargs)
            found = cache.state.parts(len(pieces))
            for index, (piece, state) in enumerate(zip(pieces, found, strict=True)):
                piece.sequence.after.setdefault(piece.end, {})[layer] = state
                outputs[piece.first] = output[index : index + 1]
        return torch.cat([outputs[first] for first in sorted(outputs)], dim=1)


def _batches(sequences: Sequence[_RecurrentSequence]) -> list[list[_RowRun]]:
    first: dict[tuple[int, bool], list[_RowRun]] = {}
    second: dict[tuple[int, bool], list[_RowRun]] = {}
    for sequence in sequences:
        rows = sequence.rows
        end = rows.first_row + rows.num_rows
        middle = rows.first_row + rows.settled - rows.start
        if not rows.first_row < middle < end:
            middle = end
        head = _RowRun(sequence, rows.first_row, middle, rows.start)
        first.setdefault(head.kind, []).append(head)
        if middle < end:
            tail = _RowRun(sequence, middle, end, head.end)
            second.setdefault(tail.kind, []).append(tail)
    return [*first.values(), *second.values()]


def find_recurrent(model: PreTrainedModel, run: Callable[[DynamicCache], object]) -> list[torch.nn.Module]:
    """The modules that keep states, in the order in which ``run``, a forward with a cache, runs them."""
    watch = _ModuleWatch(model)
    try:
        run(watch)
    finally:
        watch.remove()
    return watch.found


class _ModuleWatch(DynamicCache):
    """A cache of the library that notes which modules keep states in it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config.get_text_config())
        self.found: list[torch.nn.Module] = []
        self._running: list[torch.nn.Module] = []
        self._hooks = [
            hook
            for module in model.modules()
            if hasattr(module, "layer_idx")
            for hook in (
                module.register_forward_pre_hook(lambda module, args: self._running.append(module)),
                module.register_forward_hook(lambda module, args, output: self._leave()),
            )
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._note()
        found: torch.Tensor = super().update_conv_state(*args, **kwargs)
        return found

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._note()
        found: torch.Tensor = super().update_recurrent_state(*args, **kwargs)
        return found

    def _leave(self) -> None:
        self._running.pop()

    def _note(self) -> None:
        if not self._running:
            raise ConfigError("the model is not supported: its recurrent layers do not say which they are")
        if self._running[-1] not in self.found:
            self.found.append(self._running[-1])


def _cache_argument(module: torch.nn.Module) -> str:
    parameters = inspect.signature(module.forward).parameters
    found = [name for name in _CACHE_ARGUMENTS if name in parameters]
    if len(found) != 1:
        raise ConfigError(
            f"{type(module).__name__} is not supported: it takes the cache of its states in a way of its own"
        )
    return found[0]
