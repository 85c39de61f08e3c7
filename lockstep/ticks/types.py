"""Column types of ticks: which names an agent may use, what a Parquet file holds, and what may be read as what.

What belongs here: the one vocabulary of types, pure. What does not: reading footers (footers.py) or data (bronze.py).
"""

from __future__ import annotations

import re

_NAMES = {
    "boolean": ("bool",),
    "tinyint": ("byte", "int8"),
    "smallint": ("short", "int16", "uint8"),
    "int": ("integer", "int32", "uint16"),
    "bigint": ("long", "int64", "uint32"),
    "float": ("real", "float32"),
    "double": ("float64", "double precision"),
    "string": ("varchar", "text", "utf8", "str", "char", "large_string", "large_utf8", "json", "uuid"),
    "binary": ("bytes", "blob", "varbinary", "bytea", "large_binary"),
    "date": ("date32", "date32[day]"),
    "timestamp": ("timestamptz", "timestamp with time zone", "timestamp_ltz"),
    "timestamp_ntz": ("datetime", "timestamp without time zone"),
}
_CANONICAL = {name: main for main, others in _NAMES.items() for name in (main, *others)}
_DECIMAL = re.compile(r"(?:decimal|numeric|decimal128)\s*\(\s*(\d{1,2})\s*,\s*(\d{1,2})\s*\)", re.ASCII)
_LENGTH = re.compile(r"(?:var)?char\s*\(\s*\d{1,6}\s*\)", re.ASCII)
_ARROW_TIMESTAMP = re.compile(r"timestamp\[(?:s|ms|us)(?P<zone>, tz=[A-Za-z0-9_+:/-]{1,40})?\]", re.ASCII)

# What a value may become without losing anything. A timestamp without a zone is taken as UTC, as Spark's session does.
_WIDER = {
    "tinyint": ("smallint", "int", "bigint"),
    "smallint": ("int", "bigint"),
    "int": ("bigint",),
    "float": ("double",),
    "date": ("timestamp_ntz", "timestamp"),
    "timestamp_ntz": ("timestamp",),
    "null": tuple(_NAMES),
}


def canonical(name: str) -> str | None:
    """Spark's name of a type that an agent may declare, or None for one that bronze does not take."""
    text = " ".join(name.strip().lower().split())
    if match := _DECIMAL.fullmatch(text):
        precision, scale = int(match[1]), int(match[2])
        return f"decimal({precision},{scale})" if 1 <= precision <= 38 and scale <= precision else None
    if _LENGTH.fullmatch(text):
        return "string"
    if match := _ARROW_TIMESTAMP.fullmatch(name.strip()):
        return "timestamp" if match["zone"] else "timestamp_ntz"
    return _CANONICAL.get(text)


def from_arrow(name: str) -> str | None:
    """Spark's name of what a Parquet file holds, by Arrow's name of it; None for what bronze does not take.

    Nanoseconds are not taken, because Spark cannot read them: an agent writes microseconds.
    """
    text = name.strip()
    if text == "null":
        return "null"
    if text.startswith("dictionary<values="):  # categories: the values count
        text = text.removeprefix("dictionary<values=").partition(",")[0]
    text = {"float": "float32", "double": "float64", "halffloat": ""}.get(text, text)
    return canonical(text)


def fits(stored: str, wanted: str) -> bool:
    """Whether every value of type `stored` is a value of type `wanted`."""
    if stored == wanted or wanted in _WIDER.get(stored, ()):
        return True
    if (left := _DECIMAL.fullmatch(stored)) and (right := _DECIMAL.fullmatch(wanted)):
        scale, wider = int(left[2]), int(right[2])
        return wider >= scale and int(right[1]) - wider >= int(left[1]) - scale
    return stored == "null" and wanted.startswith("decimal")
