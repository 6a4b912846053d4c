"""Files of llama.cpp (GGUF): what their headers say, and how they become checkpoints."""
