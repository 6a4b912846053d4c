"""Text to token ids and back: the model's tokenizer, incremental detokenisation, stop strings.

Ingress and router share :class:`TextStream`, so that they agree on where an output's text is cut.
``tokenizers`` and ``transformers`` are imported when a tokenizer is loaded; a tokenizer with a complete
``tokenizer.json`` does not need torch.
"""

from specray.tokenization.chat import ChatMessage, ChatOptions
from specray.tokenization.loading import load_tokenizer
from specray.tokenization.text import TextStream, make_stop_matcher
from specray.tokenization.tokenizer import Tokenizer

__all__ = ["ChatMessage", "ChatOptions", "TextStream", "Tokenizer", "load_tokenizer", "make_stop_matcher"]
