"""Where messages begin and end in a prompt: engines leave snapshots of recurrent layers' states there.

What comes next in a conversation has the same tokens up to the end of the last message, or up to its
beginning where it is written anew; the answer's own beginning may be written otherwise in a later prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from specray.tokenization import Tokenizer


def message_tails(
    content: str | None, text: str, token_ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Tokens from the beginning of the last message's text to the end of the prompt, and from its end on.

    Args:
        content: of the last message.
        text: of the prompt.
        token_ids: of ``text``.

    Returns:
        Those two numbers; nothing where the template writes the message in another form.
    """
    shown = (content or "").strip()
    begin = text.rfind(shown) if shown else -1
    if begin < 0:
        return ()
    num_behind = len(text[begin + len(shown) :].encode())
    num_bytes = num_behind + len(shown.encode())
    tails: list[int] = []
    seen = 0
    # A token with parts of both sides counts as behind a border.
    for count, token_id in enumerate(reversed(token_ids), 1):
        seen += len(tokenizer.token_bytes(token_id))
        if not tails and seen >= num_behind:
            tails.append(count if num_behind else 0)
        if seen >= num_bytes:
            return (count, *tails)
    return ()
