"""Noise, logits processors, verification rules, draft draws and logprobs: functions of logits and tokens."""
