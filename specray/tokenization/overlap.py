"""Says how two vocabularies differ: how many token ids mean the same string, and the first that does not."""

from __future__ import annotations

from collections.abc import Mapping


def difference(draft: Mapping[str, int], target: Mapping[str, int]) -> str | None:
    """Describes in words how a draft's vocabulary differs from the target's; None: they are equal.

    Args:
        draft, target: ids by token.
    """
    ours, theirs = _strings(target), _strings(draft)
    if ours == theirs:
        return None
    ids = sorted(ours.keys() | theirs.keys())
    different = [token_id for token_id in ids if ours.get(token_id) != theirs.get(token_id)]
    first, most = different[0], max(len(ours), len(theirs))
    return (
        f"{len(ids) - len(different)} of {most} token ids mean the same string; the first that does not is "
        f"{first}, {_named(theirs, first)} in the draft and {_named(ours, first)} in the target"
    )


def _strings(vocabulary: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    """The strings of each id; more than one only in a damaged vocabulary."""
    strings: dict[int, tuple[str, ...]] = {}
    for token, token_id in sorted(vocabulary.items()):
        strings[token_id] = (*strings.get(token_id, ()), token)
    return strings


def _named(strings: Mapping[int, tuple[str, ...]], token_id: int) -> str:
    return " or ".join(repr(token) for token in strings[token_id]) if token_id in strings else "unknown"
