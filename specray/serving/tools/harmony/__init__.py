"""gpt-oss's answers: messages in channels, of which some are reasoning, some content, and some calls."""
