"""The program opens the room that is asked for and no other, and shows all of them to who asks for help."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.cli import _ROOMS


def _opened(*words: str) -> set[str]:
    """The rooms whose modules the program loads for these words."""
    program = (
        "import sys; from stack import cli as stack; from lockstep import cli; stack.register(cli.app);"
        f"cli._register_rooms({(words or ('',))[0]!r});"
        "print(*(name for name, place in cli._ROOMS.items() if place.partition(':')[0] in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "rooms"), [(["vault"], {"vault"}), (["status"], set()), ([], set(_ROOMS)), (["no-such"], set(_ROOMS))]
)
def test_only_the_room_that_is_asked_for_is_opened(words: list[str], rooms: set[str]):
    """Guards the start of every command: each room that comes along costs a tenth of a second."""
    assert _opened(*words) == rooms
