"""The little of Thrift's compact protocol that a Parquet footer needs: walk a struct, read numbers, skip the rest.

What belongs here: bytes to numbers, with an error for everything that ends early, lies or nests too deeply. What does
not: what the fields mean (footers.py).
"""

from __future__ import annotations

from collections.abc import Iterator

STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT, UUID = range(14)
_FIXED = {TRUE: 0, FALSE: 0, BYTE: 1, DOUBLE: 8, UUID: 16}  # the type of a boolean field is its value
_DEEPEST = 40
_LONGEST_VARINT = 10


class Malformed(ValueError):
    """The bytes are no compact Thrift, or say something that nobody can mean."""


class Reader:
    """Reads one buffer from its beginning. Each value that `fields` or `elements` announce must be read or skipped."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Number and type of each field of the struct that begins here."""
        number = 0
        while (head := self._byte()) != STOP:
            step = head >> 4
            number = number + step if step else self.integer()
            yield number, head & 15

    def elements(self) -> Iterator[int]:
        """The type of the elements of the list that begins here, once for each."""
        head = self._byte()
        size, kind = head >> 4, head & 15
        if size == 15:
            size = self._varint()
        for _ in range(size):
            yield kind

    def integer(self) -> int:
        """A whole number of any width."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def skip(self, kind: int, depth: int = 0) -> None:
        """Pass over a value of this type."""
        if depth > _DEEPEST:
            raise Malformed("it is nested too deeply")
        if kind in (LIST, SET):
            for one in self.elements():
                self._skip_element(one, depth)
        elif kind == MAP:
            self._skip_map(depth)
        elif kind == STRUCT:
            for _, one in self.fields():
                self.skip(one, depth + 1)
        else:
            self._skip_plain(kind)

    def _skip_plain(self, kind: int) -> None:
        if kind in (I16, I32, I64):
            self._varint()
        elif kind == BINARY:
            self._forward(self._varint())
        elif kind in _FIXED:
            self._forward(_FIXED[kind])
        else:
            raise Malformed(f"there is no type {kind}")

    def _skip_map(self, depth: int) -> None:
        size = self._varint()
        kinds = self._byte() if size else 0
        for _ in range(size):
            self._skip_element(kinds >> 4, depth)
            self._skip_element(kinds & 15, depth)

    def _skip_element(self, kind: int, depth: int) -> None:
        """An element is never smaller than a byte, so that a list cannot claim more of them than there are bytes."""
        self.skip(BYTE if kind in (TRUE, FALSE) else kind, depth + 1)

    def _varint(self) -> int:
        value = 0
        for place in range(_LONGEST_VARINT):
            byte = self._byte()
            value |= (byte & 127) << (7 * place)
            if byte < 128:
                return value
        raise Malformed("a number is too long")

    def _byte(self) -> int:
        self._forward(1)
        return self._data[self._at - 1]

    def _forward(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise Malformed("it ends early")
