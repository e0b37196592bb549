"""A headless Chromium, spoken to through the pipe of its debugging protocol."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next(
    (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))),
    None,
)


class Browser:
    """One page; `requests` are the addresses it asked for, `complaints` what its console says."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()  # read and write end of each
        command = [
            str(PROGRAM), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={folder}",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "about:blank",
        ]  # fmt: skip

        def as_3_and_4() -> None:
            low, high = os.dup(ours[0]), os.dup(theirs[1])
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            command,
            preexec_fn=as_3_and_4,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._write, self._read = ours[1], theirs[0]
        os.set_blocking(self._read, False)
        self._buffer, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[Any] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result. Raises RuntimeError for an error or after 30 s."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            self._event(found)

    def open(self, url: str, dark: bool = False, width: int = 1100, height: int = 1400) -> None:
        """Show an address, and wait until all of it is there and half a second more."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._event(self._next())
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            self.call("Runtime.evaluate", expression="1")
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """What is seen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _event(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.complaints.append(params)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + 30
        while b"\0" not in self._buffer:
            if time.monotonic() > until or self._process.poll() is not None:
                raise RuntimeError("the browser does not answer")
            try:
                self._buffer += os.read(self._read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
