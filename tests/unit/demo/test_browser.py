"""The browser of the demo: found, or a sentence that says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.kernel.errors import InvalidInput
from stack.demo import browser


def test_a_machine_without_chromium_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv(browser.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidInput, match=r"install the package chromium.*LOCKSTEP_CHROMIUM"):
        browser.find_chromium()


def test_the_variable_names_the_browser_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program = tmp_path / "my-browser"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv(browser.VARIABLE, str(program))
    assert browser.find_chromium() == str(program)
    monkeypatch.setenv(browser.VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(InvalidInput, match="is no browser"):
        browser.find_chromium()


def test_a_browser_that_dies_at_once_is_said_and_leaves_no_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program = tmp_path / "my-browser"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv(browser.VARIABLE, str(program))
    monkeypatch.setattr(browser.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Exception, match="ended at once with 3"), browser.browser():
        pytest.fail("there is no page")
    assert list(tmp_path.glob("lockstep-browser-*")) == []
