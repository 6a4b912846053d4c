"""OpenAI's Responses API, stateless, answered by chats."""
