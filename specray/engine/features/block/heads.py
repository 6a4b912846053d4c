"""What DSpark (arXiv 2607.05147) has after a block: the Markov head and the confidence head.

The rows of a block know no draft token. The Markov head lets them: it adds to the logits of a row what the
token before it makes likelier, in as many numbers as its rank. The confidence head says how likely the target
draws what a row says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F

from specray.engine.features.base import TargetShape
from specray.engine.features.decoder_layers import Lowering, WeightAndBias, read_linear
from specray.engine.features.files import DrafterFiles
from specray.engine.features.vocabulary import take_rows

_PREFIX = "markov_head."
_CONFIDENCE = "confidence_head.proj"


class MarkovKind(Enum):
    """How the token before is seen."""

    VANILLA = "vanilla"
    GATED = "gated"
    """The token before, as the row's hidden state lets it through."""
    RNN = "rnn"
    """Together with those before it, in a state."""


@dataclass(frozen=True, slots=True)
class MarkovTensors:
    """The Markov head of a checkpoint."""

    kind: MarkovKind
    embedding: torch.Tensor
    """Vectors of the token before, ``[vocab_size, rank]``."""
    output: torch.Tensor
    """Rows in the order of the logits, ``[num_logits, rank]``."""
    joint: WeightAndBias | None
    """Layer over state, embedding and hidden state; None: vanilla."""

    @property
    def rank(self) -> int:
        return self.embedding.shape[1]

    @property
    def num_weights(self) -> int:
        joint = 0 if self.joint is None else self.joint[0].numel()
        return self.embedding.numel() + self.output.numel() + joint


def read_markov(
    files: DrafterFiles, hidden: int, target: TargetShape, num_logits: int, order: torch.Tensor | None
) -> MarkovTensors | None:
    """The Markov head; None: there is none.

    Args:
        hidden: numbers of the drafter's rows.
        num_logits: rows of the drafter's head.
        order: stored row of each logit; None: the same.

    Raises:
        ConfigError: names the tensor or field that does not fit, and what would.
    """
    if not any(name.startswith(_PREFIX) for name in files.tensors):
        return None
    rank = files.shape(f"{_PREFIX}markov_w1.weight")[1]
    kind, joint = MarkovKind.VANILLA, None
    if files.has(f"{_PREFIX}gate_proj.weight"):
        kind, joint = MarkovKind.GATED, read_linear(files, f"{_PREFIX}gate_proj", rank, hidden + rank)
    elif files.has(f"{_PREFIX}joint_proj.weight"):
        joint = read_linear(files, f"{_PREFIX}joint_proj", 3 * rank, 2 * rank + hidden)
        kind = MarkovKind.RNN
    named = files.config.get("markov_head_type", kind.value)
    if named != kind.value:
        raise files.refuse(f"markov_head_type is {named!r}; allowed: {kind.value!r}, as the tensors are")
    name, vocab_size = f"{_PREFIX}markov_w2.weight", target.vocab_size
    is_whole = num_logits == vocab_size and order is None
    output = (take_rows if is_whole else DrafterFiles.take)(files, name, num_logits, rank)
    embedding = take_rows(files, f"{_PREFIX}markov_w1.weight", vocab_size, rank)
    return MarkovTensors(kind, embedding, output if order is None else output[order], joint)


def read_confidence(files: DrafterFiles, hidden: int, markov: MarkovTensors | None) -> WeightAndBias | None:
    """The confidence head, over hidden states, or these and the Markov head's embeddings; None: none."""
    name = f"{_CONFIDENCE}.weight"
    if not files.has(name):
        return None
    width = files.shape(name)[1]
    widths = [hidden] if markov is None else [hidden, hidden + markov.rank]
    if width not in widths:
        raise files.refuse(f"{name} reads {width} numbers; allowed: {' or '.join(map(str, widths))}")
    return read_linear(files, _CONFIDENCE, 1, width)


class MarkovHead:
    """The Markov head, on the target's device and in its data type."""

    def __init__(self, tensors: MarkovTensors, lowering: Lowering) -> None:
        self._kind, self._rank = tensors.kind, tensors.rank
        self._embedding = lowering.cast(tensors.embedding)
        self._output = lowering.linear((tensors.output, None))
        self._joint = None if tensors.joint is None else lowering.linear(tensors.joint)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self._embedding)

    def step(
        self, embedded: torch.Tensor, hidden: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is added to the float32 logits of some rows, and their states.

        Args:
            embedded: the tokens before, ``[num_rows, rank]``.
            hidden: of the rows, ``[num_rows, hidden_size]``.
            states: of the rows before; None: there are none.
        """
        if self._joint is None:
            return self._output.precise(embedded), None
        if self._kind is MarkovKind.GATED:
            gate = self._joint(torch.cat((hidden, embedded), -1)).sigmoid()
            return self._output.precise(gate * embedded), None
        states = torch.zeros_like(embedded) if states is None else states
        gate, proposed, said = self._joint(torch.cat((states, embedded, hidden), -1)).chunk(3, -1)
        gate = gate.sigmoid()
        states = gate * states + (1.0 - gate) * proposed.tanh()
        return self._output.precise(said.tanh()), states
