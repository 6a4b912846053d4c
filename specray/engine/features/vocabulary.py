"""A drafter's vocabulary: its embedding, its head over some or all token ids, and its mask token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specray.engine.features.base import TargetParts, TargetShape, TokenRows
from specray.engine.features.files import DrafterFiles

_MASK_IDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Keys of the configuration that name the mask token, the surest first."""


def read_embedding(files: DrafterFiles, hidden: int, target: TargetShape) -> torch.Tensor | None:
    """The drafter's own embedding ``[.., hidden]``; None: the target's, if it fits, or ConfigError."""
    name = "embed_tokens.weight"
    table = take_rows(files, name, target.vocab_size, hidden) if files.has(name) else None
    if table is None and hidden != target.hidden_size:
        raise files.refuse(
            f"embed_tokens.weight is missing; allowed: only where the drafter is as wide as the target, "
            f"{target.hidden_size}, and not {hidden}"
        )
    return table


def take_rows(files: DrafterFiles, name: str, vocab_size: int, columns: int) -> torch.Tensor:
    """A matrix with a row for each of the target's token ids, without the rows of padding after them.

    Raises:
        ConfigError: it does not fit; it has more rows, and no ``vocab_size`` of the configuration says that
            they are token ids.
    """
    num_rows = files.shape(name)[0]
    if num_rows > vocab_size:
        sections = (files.config, files.section("transformer_layer_config"))
        declared = next((each["vocab_size"] for each in sections if each.get("vocab_size") is not None), None)
        if declared not in (num_rows, vocab_size):
            raise files.refuse(
                f"{name} has {num_rows} rows, the target {vocab_size} token ids, and vocab_size is "
                f"{declared!r}; allowed: {vocab_size} rows, or more with vocab_size {num_rows}"
            )
        return files.take(name, num_rows, columns)[:vocab_size]
    return files.take(name, vocab_size, columns)


def read_head(
    files: DrafterFiles, hidden: int, target: TargetShape
) -> tuple[NDArray[np.int64] | None, torch.Tensor | None, torch.Tensor | None]:
    """The head and its vocabulary.

    Returns:
        Token ids of the logits, ascending, or None for all of the target's; the head's rows in their order,
        or None for the target's; and the order: the stored row of each, None where it is the stored one.

    Raises:
        ConfigError: names the tensor or field that does not fit, and what would.
    """
    vocab_size = target.vocab_size
    files.pass_over(["t2d"])
    num_rows = files.shape("lm_head.weight")[0] if files.has("lm_head.weight") else None
    given = files.config.get("draft_vocab_size")
    offsets = files.tensors.get("d2t")
    is_padded = offsets is None and num_rows is not None and num_rows > vocab_size
    if is_padded and given in (None, num_rows, vocab_size):
        return None, take_rows(files, "lm_head.weight", vocab_size, hidden), None
    if num_rows is not None and given not in (None, num_rows):
        raise files.refuse(f"draft_vocab_size is {given}; allowed: {num_rows}, the rows of lm_head.weight")
    head = None if num_rows is None else files.take("lm_head.weight", num_rows, hidden)
    if head is None and hidden != target.hidden_size:
        raise files.refuse(f"lm_head.weight is missing; allowed: [.., {hidden}]")
    if offsets is None and num_rows in (None, vocab_size):
        return None, head, None
    num_ids = num_rows or (0 if offsets is None else len(offsets))
    token_ids = np.arange(num_ids, dtype=np.int64)
    if offsets is not None:
        token_ids = token_ids + files.take_whole_numbers("d2t", num_ids).numpy()
    known = {token_id for token_id in token_ids.tolist() if 0 <= token_id < vocab_size}
    if not num_ids or len(known) < num_ids:
        raise files.refuse(f"d2t gives token ids that are no {num_ids} different ones of 0..{vocab_size - 1}")
    order = torch.from_numpy(np.argsort(token_ids))
    head = None if head is None else head[order]
    return None if num_ids == vocab_size else token_ids[order.numpy()], head, order


def read_mask_id(files: DrafterFiles, sections: Sequence[dict[str, Any]], vocab_size: int) -> int:
    """The mask token. Raises ConfigError: none is named, or no token of the target.

    Args:
        sections: of the configuration, the surest first.
    """
    found = [section[key] for key in _MASK_IDS for section in sections if section.get(key) is not None]
    token_id = found[0] if found else None
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise files.refuse(
            f"{_MASK_IDS[0]} is {token_id!r}; allowed: a token id, 0..{vocab_size - 1} (also as "
            f"{', '.join(_MASK_IDS[1:])})"
        )
    return token_id


def make_embedding(table: torch.Tensor | None, parts: TargetParts) -> TokenRows:
    if table is None:
        return parts.embed
    own = table.to(device=parts.device, dtype=parts.dtype)
    return lambda token_ids: torch.nn.functional.embedding(token_ids, own)


def make_head(
    head: torch.Tensor | None, token_ids: NDArray[np.int64] | None, parts: TargetParts
) -> TokenRows:
    """Logits of rows after the final norm; without ``head`` the target's, of ``token_ids`` or all."""
    if head is not None:
        weight = head.to(device=parts.device, dtype=parts.dtype).contiguous()
        return parts.operators.linear(weight, None).precise
    if token_ids is None:
        return parts.logits
    index = torch.from_numpy(token_ids).to(parts.device)
    return lambda rows: parts.logits(rows).index_select(1, index)
