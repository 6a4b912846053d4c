"""Text to token ids and back: the model's tokenizer, incremental detokenisation, stop strings.

Ingress and router both need to know where the text of an output is cut; they share :class:`TextStream`, so
that they cannot disagree. ``tokenizers`` and ``transformers`` are imported when a tokenizer is loaded, and
torch is not needed for a tokenizer whose ``tokenizer.json`` says all.
"""

from specray.tokenization.loading import load_tokenizer
from specray.tokenization.text import TextStream, make_stop_matcher
from specray.tokenization.tokenizer import ChatMessage, Tokenizer

__all__ = ["ChatMessage", "TextStream", "Tokenizer", "load_tokenizer", "make_stop_matcher"]
