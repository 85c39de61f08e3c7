"""How an expected failure is told to a person."""

from __future__ import annotations

import pytest

from lockstep.kernel.errors import InvalidInput
from stack.cli import explain


def test_square_brackets_in_an_error_are_words_and_not_markup(capsys: pytest.CaptureFixture[str]):
    """Guards the one line that says what is wrong: a file called `[/red].json` must not replace it by a traceback."""
    assert explain(InvalidInput("the request cannot be read.", unit="[/red].json")) == 1
    assert "[/red].json: the request cannot be read." in capsys.readouterr().err
