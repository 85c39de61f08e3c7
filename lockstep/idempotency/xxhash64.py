"""XXH64 with Spark's seed: the same 64 bits as `xxhash64(text)` in Spark SQL.

What belongs here: the hash of bytes. What does not: how rows become bytes (keyed.py). In plain Python, for keys of
single rows; a frame is hashed by Spark.
"""

from __future__ import annotations

from struct import unpack_from

SPARK_SEED = 42

_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_ALL = 2**64 - 1


def xxhash64(data: bytes, seed: int = SPARK_SEED) -> int:
    """The hash as an unsigned number."""
    at = 0
    if len(data) >= 32:
        lanes = [seed + _P1 + _P2, seed + _P2, seed, seed - _P1]
        for at in range(0, len(data) - 31, 32):
            lanes = [_round(lane, word) for lane, word in zip(lanes, unpack_from("<4Q", data, at), strict=True)]
        at += 32
        value = sum(_turned(lane & _ALL, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            value = ((value ^ _round(0, lane)) * _P1 + _P4) & _ALL
    else:
        value = seed + _P5
    return _mixed(_tail((value + len(data)) & _ALL, data[at:]))


def _tail(value: int, rest: bytes) -> int:
    at = 0
    while len(rest) - at >= 8:
        (word,) = unpack_from("<Q", rest, at)
        value = (_turned(value ^ _round(0, word), 27) * _P1 + _P4) & _ALL
        at += 8
    if len(rest) - at >= 4:
        (half,) = unpack_from("<I", rest, at)
        value = (_turned(value ^ (half * _P1 & _ALL), 23) * _P2 + _P3) & _ALL
        at += 4
    for byte in rest[at:]:
        value = _turned(value ^ (byte * _P5 & _ALL), 11) * _P1 & _ALL
    return value


def _mixed(value: int) -> int:
    value = (value ^ value >> 33) * _P2 & _ALL
    value = (value ^ value >> 29) * _P3 & _ALL
    return value ^ value >> 32


def _round(lane: int, word: int) -> int:
    return _turned((lane + word * _P2) & _ALL, 31) * _P1 & _ALL


def _turned(value: int, by: int) -> int:
    return (value << by | value >> (64 - by)) & _ALL
