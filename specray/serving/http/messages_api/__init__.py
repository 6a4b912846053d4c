"""Anthropic's Messages API, answered by chats."""
