"""Chat completions over HTTP: bodies, conversations and answers with reasoning and tool calls."""
