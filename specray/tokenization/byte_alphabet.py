"""The alphabet in which byte-level vocabularies spell bytes (GPT-2's ``bytes_to_unicode``)."""

from __future__ import annotations


def spelled_bytes() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    ranks = {byte: rank for rank, byte in enumerate(others)}
    return [chr(byte) if byte in printable else chr(256 + ranks[byte]) for byte in range(256)]
