"""A headless Chromium, used by its DevTools protocol over a websocket: no driver needs to be installed."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

#: Where distributions install it.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_PATIENCE_S = 30.0


@dataclass
class Page:
    """One tab."""

    socket: ClientConnection
    said: list[str] = field(default_factory=list)
    """Errors of scripts, and messages of the browser such as refusals by the content security policy."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def send(self, method: str, **parameters: Any) -> Any:
        """Carry out a command of the protocol and return its result."""
        number = next(self._numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self.socket.recv(_PATIENCE_S))
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.said.append(json.dumps(answer["params"]))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.run(script):
            assert time.monotonic() < deadline, f"{script} stays false; the browser said {self.said}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key)

    def open(self, url: str, *, width: int = 1500, height: int = 1000) -> None:
        """Open an address in a window of a size."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=url)

    def shoot(self, file: Path) -> None:
        """Write a picture of the window as PNG."""
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Run a browser with its profile in a folder, and provide a tab."""
    assert CHROMIUM is not None
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    command = [CHROMIUM, *options, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            port, deadline = folder / "DevToolsActivePort", time.monotonic() + _PATIENCE_S
            while not port.exists() or not port.read_text().count("\n"):
                assert process.poll() is None, "the browser ended"
                assert time.monotonic() < deadline, "the browser does not start"
                time.sleep(0.05)
            address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}"
            tab = next(each for each in httpx.get(f"{address}/json").json() if each["type"] == "page")
            with connect(tab["webSocketDebuggerUrl"], max_size=None, open_timeout=_PATIENCE_S) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    page.send(f"{domain}.enable")
                yield page
        finally:
            process.terminate()
