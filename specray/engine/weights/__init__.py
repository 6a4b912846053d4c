"""Weights as files hold them: blocks of integer codes with scales, in the file's own bits."""
