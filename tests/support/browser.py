"""A page in headless Chromium, driven over its debugging pipe: no driver, no further package."""

import contextlib
import json
import os
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
)  # fmt: skip
ENTER = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}


def chromium() -> str | None:
    """The path of an installed Chromium or Chrome."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def browsing(url, folder):
    """A `Page` that shows `url`, of a browser that keeps its files in `folder` and then ends."""
    (their_end, commands), (answers, their_other) = os.pipe(), os.pipe()
    # It reads commands from descriptor 3, and writes answers to 4.
    shell = f'exec "$@" 3<&{their_end} 4>&{their_other}'
    options = ["--remote-debugging-pipe", f"--user-data-dir={folder}", *QUIET, "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", shell, "sh", chromium(), *options], pass_fds=(their_end, their_other),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(their_end)
    os.close(their_other)
    with open(commands, "wb", buffering=0) as wire, open(answers, "rb", buffering=0) as read:
        try:
            yield Page(wire, read, url)
        finally:
            process.kill()
            process.wait()


class Page:
    """One page: what a person types, and what the page then is."""

    def __init__(self, wire, read, url):
        self._wire, self._read, self._rest, self._number = wire, read, b"", 0
        self._session = None
        target = self.call("Target.createTarget", url=url)["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._loaded()

    def _loaded(self):
        self.until("location.protocol === 'http:' && document.readyState === 'complete'")

    def call(self, method, **parameters):
        """The result of a command of Chromium's debugging protocol."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        self._wire.write(json.dumps(asked).encode() + b"\0")
        while True:  # events come between answers
            while b"\0" not in self._rest:
                more = self._read.read(1 << 16)
                assert more, "the browser has ended"
                self._rest += more
            message, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def reload(self):
        """As by a person's F5."""
        self.value("document.before = true")
        self.call("Page.reload")
        self.until("!document.before")
        self._loaded()

    def value(self, script):
        """What an expression of JavaScript is on the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script, seconds=30.0):
        """The expression's value once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.value(script)):
            assert time.monotonic() < end, f"{script} is still {value!r}"
            time.sleep(0.02)
        return value

    def type(self, text):
        """Text as from a keyboard, into what has the focus, and Enter."""
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **ENTER)
