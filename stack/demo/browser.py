"""A headless Chromium that looks at pages, clicks what a person would click, and takes pictures.

What belongs here: starting Chromium and speaking its DevTools protocol. What does not: which pages are worth seeing. No
driver and no package beyond a websocket is needed: a page is asked by JavaScript, and clicks are real mouse events.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from lockstep.kernel.errors import InvalidInput, Terminal, Transient

VARIABLE = "LOCKSTEP_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_START_SECONDS = 60.0
_CALL_SECONDS = 60.0
_POLL_SECONDS = 0.3

# The element nearest to the reader that shows the words: no other element inside it shows them too.
_FIND = """
(() => {
  const words = %s, selector = %s;
  const shows = e => words === "" || (e.innerText || e.textContent || "").trim().includes(words);
  const visible = e => { const r = e.getBoundingClientRect(); return r.width > 0 && r.height > 0; };
  const all = [...document.querySelectorAll(selector)].filter(e => shows(e) && visible(e));
  const e = all.find(one => !all.some(other => other !== one && one.contains(other)));
  if (!e || e.disabled || e.getAttribute("aria-disabled") === "true") return null;
  e.scrollIntoView({block: "center"});
  const r = e.getBoundingClientRect();
  const place = {x: r.x + r.width / 2, y: r.y + r.height / 2};
  const top = document.elementFromPoint(place.x, place.y);
  return top && (e.contains(top) || top.contains(e)) ? place : null;
})()"""


def find_chromium() -> str:
    """The browser of this machine, or a sentence that says what to install."""
    given = os.environ.get(VARIABLE)
    found = shutil.which(given) if given else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise InvalidInput(
            f"{given} is no browser." if given else "no Chromium was found on this machine.",
            next_step=f"install the package chromium (or Google Chrome), or set {VARIABLE} to its program.",
        )
    return found


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0

    def open(self, url: str) -> None:
        """Go to an address and wait until the document is there."""
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'", f"{url} to load")

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise Terminal(f"the page could not answer: {answer['exceptionDetails'].get('text')}")
        return answer["result"].get("value")

    def wait(self, script: str, what: str, seconds: float = 60.0) -> Any:
        """Ask again and again until the answer is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(Terminal):  # the page is between two documents
                if found := self.ask(script):
                    return found
            time.sleep(_POLL_SECONDS)
        raise Transient(f"the page did not show {what} within {seconds:.0f} s. It shows: {self.text()[:500]!r}")

    def see(self, words: str, seconds: float = 60.0) -> None:
        """Wait until the page shows these words."""
        self.wait(f"document.body && document.body.innerText.includes({_js(words)})", repr(words), seconds)

    def click(self, words: str, selector: str = "*", seconds: float = 60.0) -> None:
        """Press the mouse on what shows these words, as soon as it is there, enabled, uncovered and at rest."""
        find, what, before = _FIND % (_js(words), _js(selector)), f"{words!r} to click", None
        while (place := self.wait(find, what, seconds)) != before:  # a dialog that opens moves for a while
            before = place
            time.sleep(_POLL_SECONDS)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self._call("Input.dispatchMouseEvent", type=kind, x=place["x"], y=place["y"], **button)

    def settle(self, seconds: float = 20.0) -> None:
        """Wait until the page has stopped changing: the same words twice, two seconds apart."""
        deadline, before = time.monotonic() + seconds, ""
        while time.monotonic() < deadline:
            now = self.text()
            if now and now == before:
                return
            before = now
            time.sleep(2)

    def text(self) -> str:
        """All words of the page."""
        return str(self.ask("document.body ? document.body.innerText : ''") or "")

    def picture(self, path: Path) -> None:
        """Save what the window shows as a PNG."""
        answer = self._call("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        deadline = time.monotonic() + _CALL_SECONDS
        while time.monotonic() < deadline:
            answer = json.loads(self._socket.recv(timeout=_CALL_SECONDS))
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise Terminal(f"Chromium refused {method}: {answer['error'].get('message')}")
                found: dict[str, Any] = answer["result"]
                return found
        raise Transient(f"Chromium did not answer {method}.")


@contextmanager
def browser(width: int = 1280, height: int = 800) -> Iterator[Page]:
    """A tab of a fresh browser, gone afterwards with its profile."""
    program = find_chromium()
    with tempfile.TemporaryDirectory(prefix="lockstep-browser-", ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run"]
        # Root has no sandbox, and a container's /dev/shm is too small for a page of this size.
        options += ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"]
        process = subprocess.Popen(
            [program, *options, f"--window-size={width},{height}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the demo; the browser ends with it, below
        )
        try:
            with connect(_address(process, Path(profile)), max_size=None, open_timeout=_START_SECONDS) as socket:
                page = Page(socket)
                page._call("Page.enable")
                yield page
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the browser with all its children: one that is left would write its profile again while it is removed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own group, see start_new_session
    process.wait()


def _address(process: subprocess.Popen[bytes], profile: Path) -> str:
    """Where the first tab listens. Chromium writes its port into the profile when it is ready."""
    import httpx

    deadline, told = time.monotonic() + _START_SECONDS, profile / "DevToolsActivePort"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Terminal(f"Chromium ended at once with {process.returncode}.", next_step="start it by hand and look.")
        with contextlib.suppress(OSError, IndexError, httpx.HTTPError):
            port = told.read_text().splitlines()[0]
            tabs = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=5).json()
            for tab in tabs:
                if tab["type"] == "page":
                    return str(tab["webSocketDebuggerUrl"])
        time.sleep(_POLL_SECONDS)
    raise Transient(f"Chromium was not ready within {_START_SECONDS:.0f} s.")


def _js(value: object) -> str:
    return json.dumps(value)
