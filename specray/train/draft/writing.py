"""Lets a target write many rows at once: conversations whose turns it writes itself, and plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specray.train.draft.decoding import row_decoder
from specray.train.draft.markers import TurnMarkers
from specray.train.draft.prompts import Beginning

_USER, _ASSISTANT, _TEXT = 0, 1, 2
_ROLES = {"user": _USER, "assistant": _ASSISTANT, "text": _TEXT}
TEMPERATURES = (0.0, 1.0, 0.0, 0.7)
"""Temperatures of answers, row by row in turn."""
_NO_MARKERS = TurnMarkers(opening=(), to_assistant=(0,), to_user=(0,))
"""Stand-in where no row has turns."""


@dataclass(frozen=True, slots=True)
class Written:
    """Rows of text; what a server would be asked to generate is marked."""

    token_ids: npt.NDArray[np.unsignedinteger]
    """``[num_rows, row_len]``."""
    is_answer: npt.NDArray[np.bool_]
    """Same shape: drawn by the model as an answer, or as the rest of a plain text."""
    domains: npt.NDArray[np.str_]
    """Domain of each row."""
    is_held_out: npt.NDArray[np.bool_]
    """Rows that are evaluated on, and never trained on."""

    def __getitem__(self, rows: npt.NDArray[np.bool_]) -> Written:
        return Written(self.token_ids[rows], self.is_answer[rows], self.domains[rows], self.is_held_out[rows])


@torch.no_grad()
def write_rows(
    model: Any,
    beginnings: Sequence[Beginning],
    markers: TurnMarkers | None,
    *,
    row_len: int,
    seed: int,
    first_place: int = 0,
    end_ids: Collection[int] = (),
) -> Written:
    """Writes one row for each beginning, all side by side, token by token.

    A turn ends where the model ends it; the marker of the next one follows, and the model goes on in the
    other's place until the row is full.

    Args:
        model: any causal language model of transformers.
        markers: what stands around turns; None: no beginning has turns.
        row_len: tokens of a row, with what it begins with, which is cut to that.
        first_place: rows that were written before.
        end_ids: tokens after which a server stops. They end a turn as the template's own does; what follows
            one in plain text is no answer.
    """
    device, num_rows = model.device, len(beginnings)
    given, lengths = _padded(beginnings, row_len, device)
    role = torch.tensor([_ROLES[beginning.goes_on] for beginning in beginnings], device=device)
    places = torch.arange(first_place, first_place + num_rows, device=device)
    # One further every ten rows, as every tenth is held out: all temperatures are, too.
    turn = (places + places // 10) % len(TEMPERATURES)
    temperature = torch.tensor(TEMPERATURES, device=device)[turn][:, None]
    turns = _Turns(markers or _NO_MARKERS, role, torch.tensor(sorted(end_ids), device=device))
    generator = torch.Generator(device).manual_seed(seed)
    decoder = row_decoder(model, num_rows=num_rows, max_len=row_len)
    rows = torch.empty(num_rows, row_len, dtype=torch.long, device=device)
    is_answer = torch.zeros(num_rows, row_len, dtype=torch.bool, device=device)
    rows[:, 0] = given[:, 0]
    for column in range(1, row_len):
        logits = decoder.forward(rows[:, column - 1 : column]).float()
        # Temperature of what the model writes in the user's place: the variety of the text comes from there.
        own = torch.where((turns.role == _USER)[:, None], 0.9, temperature)
        drawn = draw_tokens(logits, own[:, 0], generator)
        is_given = column < lengths
        rows[:, column], is_answer[:, column] = turns.advance(drawn, given[:, column], is_given)
    width = np.uint16 if logits.shape[1] <= 1 << 16 else np.uint32
    return Written(
        rows.cpu().numpy().astype(width),
        is_answer.cpu().numpy(),
        np.array([beginning.domain for beginning in beginnings]),
        np.array([beginning.is_held_out for beginning in beginnings]),
    )


def draw_tokens(logits: torch.Tensor, temperature: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token of each row, by one uniform number: noise for every token would take as long as layers do."""
    drawn = logits.argmax(-1)
    warm = temperature.nonzero()[:, 0]
    below = (logits[warm] / temperature[warm, None]).softmax(-1).cumsum(-1)
    place = below[:, -1:] * torch.rand(len(warm), 1, generator=generator, device=logits.device)
    # The first token whose sum is above the place: one without a chance is never it.
    found = torch.searchsorted(below, place, right=True)[:, 0]
    drawn[warm] = found.clamp(max=logits.shape[1] - 1)
    return drawn


class _Turns:
    """Whose turn it is in each row, and how far its marker is written."""

    def __init__(self, markers: TurnMarkers, role: torch.Tensor, end_ids: torch.Tensor) -> None:
        width = max(len(markers.to_assistant), len(markers.to_user))
        both = (markers.to_user, markers.to_assistant)
        device = role.device
        # Indexed by the role that the marker leads to.
        self._ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in both], device=device)
        self._lengths = torch.tensor([len(ids) for ids in both], device=device)
        self.role = role
        self._end_ids = end_ids
        self._is_over = torch.zeros_like(role, dtype=torch.bool)  # plain text that ended
        self._written = torch.zeros_like(role)  # tokens of the marker that are written; 0: there is none

    def advance(
        self, drawn: torch.Tensor, given: torch.Tensor, is_given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each row's next token, and whether it is an answer's."""
        own = self.role.clamp(max=_ASSISTANT)
        in_marker = self._written > 0
        token = torch.where(in_marker, self._ids[own, self._written], drawn)
        token = torch.where(is_given, given, token)
        is_drawn = ~is_given & ~in_marker
        written = torch.where(in_marker & ~is_given, self._written + 1, self._written)
        self._written = torch.where(written >= self._lengths[own], 0, written)
        is_answer = is_drawn & (self.role != _USER) & ~self._is_over
        other = 1 - own
        is_turn = self.role != _TEXT
        is_end = is_drawn & torch.isin(token, self._end_ids)
        self._is_over |= is_end & ~is_turn
        # A turn ends with the first token of the marker that leads to the other's, whatever end was drawn.
        token = torch.where(is_end & is_turn, self._ids[other, 0], token)
        ends = is_drawn & is_turn & (token == self._ids[other, 0])
        self.role = torch.where(ends, other, self.role)
        single = self._lengths[other] == 1
        self._written = torch.where(ends & ~single, 1, self._written)
        return token, is_answer


def _padded(
    beginnings: Sequence[Beginning], row_len: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.zeros((len(beginnings), row_len), np.int64)
    lengths = []
    for row, beginning in zip(rows, beginnings, strict=True):
        ids = beginning.token_ids[:row_len]
        row[: len(ids)] = ids
        lengths.append(len(ids))
    return torch.from_numpy(rows).to(device), torch.tensor(lengths, device=device)
