"""A headless browser by its own protocol: what a page asks for, says and measures."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")


def find() -> str | None:
    """The path of a browser, if this machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The address of a server of a folder."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@dataclass
class Visit:
    """What happened on a page."""

    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    value: Any = None


class Tab:
    """One tab, in the size and scheme that is asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.count = socket, 0
        self.visit_now = Visit()
        self.loaded = False

    async def send(self, method: str, **parameters: Any) -> Any:
        """Call a method, and note the events that come before its answer."""
        self.count += 1
        await self.socket.send_json({"id": self.count, "method": method, "params": parameters})
        while True:
            message = await self._receive()
            if message.get("id") == self.count:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self.socket.receive_json(timeout=30)
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.visit_now.requests.append(parameters["request"]["url"])
            case "Network.responseReceived" if parameters["response"]["status"] >= 400:
                self.visit_now.problems.append("not found: " + parameters["response"]["url"])
            case "Runtime.exceptionThrown":
                self.visit_now.problems.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.visit_now.problems.append(parameters["entry"]["text"])
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "assert"):
                self.visit_now.problems.append(str(parameters["args"]))
            case "Page.loadEventFired":
                self.loaded = True
        return message

    async def _navigate(self, url: str) -> None:
        self.loaded = False
        await self.send("Page.navigate", url=url)
        while not self.loaded:
            await self._receive()

    async def resize(self, width: int, height: int = 900) -> None:
        """Give the open page another size, or the next one."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    async def ask(self, script: str) -> Any:
        """Evaluate a script in the open page when it has come to rest."""
        rest = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 150)))"
        await self.send("Runtime.evaluate", expression=rest, awaitPromise=True)
        answer = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        return answer["result"].get("value")

    async def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key, as a reader does."""
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        kind = "keyDown" if text else "rawKeyDown"
        await self.send("Input.dispatchKeyEvent", type=kind, text=text, **pressed)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def visit(
        self,
        url: str,
        script: str = "null",
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        picture: Path | None = None,
    ) -> Visit:
        """Open a page, wait until it has come to rest, and evaluate a script in it."""
        scheme = "dark" if dark else "light"
        # The page before must be gone: it would take note of the other scheme for this one.
        await self._navigate("about:blank")
        await self.resize(width, height)
        await self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.visit_now = Visit()
        await self._navigate(url)
        self.visit_now.value = await self.ask(script)
        if picture is not None:
            shot = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
            picture.write_bytes(base64.b64decode(shot["data"]))
        return self.visit_now


async def _port(file: Path, seconds: float = 30.0) -> int:
    """Where the browser listens, which it writes into a file of its profile."""
    for _ in range(int(seconds / 0.1)):
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the browser did not say in {seconds} s where it listens")


@contextlib.asynccontextmanager
async def browse(program: str, profile: Path) -> AsyncIterator[Tab]:
    """A browser for as long as the context lasts."""
    process = subprocess.Popen(
        [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
            "--disable-background-networking", "--disable-component-update", "--no-first-run",
            f"--user-data-dir={profile}", "about:blank",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = await _port(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                pages = json.loads(await answer.text())
            address = next(p["webSocketDebuggerUrl"] for p in pages if p["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Network", "Runtime", "Log"):
                    await tab.send(f"{domain}.enable")
                # Which scheme the reader of the last page had; a blank page has no storage.
                forget = "try { localStorage.clear() } catch {}"
                await tab.send("Page.addScriptToEvaluateOnNewDocument", source=forget)
                yield tab
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 10)
        except subprocess.TimeoutExpired:
            process.kill()
