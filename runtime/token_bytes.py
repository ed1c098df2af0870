"""The bytes that a token stands for, which decoding alone cannot tell: half a character becomes U+FFFD."""

from __future__ import annotations

import re
from functools import cache

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def piece_bytes(piece: str, *, byte_level: bool) -> bytes:
    """Return the bytes of a vocabulary's entry: of byte-level BPE (GPT-2's alphabet), or of SentencePiece.

    What is written in neither, such as a special token, stands for its own text.
    """
    if byte_level:
        table = _byte_level()
        return bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match.group(1), 16)])
    return piece.replace("\u2581", " ").encode()


@cache
def _byte_level() -> dict[str, int]:
    """Return which byte each character of the byte-level alphabet stands for.

    Bytes that are printable in Latin-1 are themselves, the others follow from U+0100 on (GPT-2's encoder).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
