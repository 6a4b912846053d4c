"""Does ahead what the first chat of an Ingress would otherwise wait for."""

from __future__ import annotations

import logging
import threading

from specray.errors import SpecrayError
from specray.serving.tools.formats import find_format
from specray.serving.tools.harmony.channels import Channels
from specray.tokenization import ChatMessage, Tokenizer

logger = logging.getLogger(__name__)


def warm_up(tokenizer: Tokenizer) -> threading.Thread:
    """Imports the template engine, compiles the chat template and fills the tokenizer's caches, in a thread.

    It logs which tokens end an output, and how calls of tools are read. The first rendering takes 0.6 s on
    two slow cores, several times a short answer.

    Returns:
        The thread, which has begun; it ends with the process.
    """
    thread = threading.Thread(target=_render, args=(tokenizer,), name="specray-warm-up", daemon=True)
    thread.start()
    return thread


def _render(tokenizer: Tokenizer) -> None:
    logger.info("outputs end at %s", tokenizer.named_ends() or "no token")
    # The first call's length is checked by it.
    assert tokenizer.longest_token_len
    if not tokenizer.has_chat_template:
        return
    try:
        _log_calls(tokenizer)
        tokenizer.encode_chat([ChatMessage("user", "Hello.")])
    except SpecrayError as error:
        # A template may want other messages than this one; its engine is there by now.
        logger.debug("the chat template was not warmed up: %s", error)
    except Exception:
        logger.warning("the chat template cannot be rendered", exc_info=True)


def _log_calls(tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template
    if template is None or not template.reads_tools:
        return
    if Channels.find(template.all_sources, tokenizer.added_token_id) is not None:
        logger.info("calls of tools are read in the format harmony")
    elif (found := find_format(template.all_sources)) is not None:
        logger.info("calls of tools are read in the format %s", found.name)
    else:
        logger.warning(
            "the chat template shows tools, but its format of calls is not known: calls stay text, and a "
            "tool_choice of required or a function, and tools with strict true, are refused"
        )
