"""Headless Firefox by WebDriver BiDi: what pages report on its console."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("firefox-esr", "firefox")


def find() -> str | None:
    """The path of Firefox, if this machine has it."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One tab. Its problems are errors on the console and requests that fail."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.count = socket, 0
        self.context = ""
        self.problems: list[str] = []

    async def send(self, method: str, **parameters: Any) -> Any:
        """Call a method, and record problems that are reported before its answer."""
        self.count += 1
        await self.socket.send_json({"id": self.count, "method": method, "params": parameters})
        while True:
            message = await self.socket.receive_json(timeout=60)
            if message.get("id") == self.count:
                if message["type"] == "error":
                    raise RuntimeError(f"{method}: {message['message']}")
                return message["result"]
            event = message.get("params", {})
            match message.get("method"):
                case "log.entryAdded" if event["level"] == "error":
                    self.problems.append(event["text"])
                case "network.fetchError":
                    self.problems.append(f"{event['errorText']}: {event['request']['url']}")

    async def visit(self, url: str, script: str = "null", width: int = 1280) -> Any:
        """Open a page, wait until it has loaded and drawn, and return what a script finds."""
        size = {"width": width, "height": 900}
        await self.send("browsingContext.setViewport", context=self.context, viewport=size)
        await self.send("browsingContext.navigate", context=self.context, url=url, wait="complete")
        rest = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))"
        answer = await self.send(
            "script.evaluate",
            expression=f"{rest}.then(() => JSON.stringify({script}))",
            target={"context": self.context},
            awaitPromise=True,
        )
        if answer["type"] == "exception":
            raise RuntimeError(answer["exceptionDetails"]["text"])
        return json.loads(answer["result"]["value"])


@contextlib.asynccontextmanager
async def browse(program: str, profile: Path) -> AsyncIterator[Tab]:
    """Firefox for as long as the context lasts."""
    process = subprocess.Popen(
        [program, "--headless", "--no-remote", "--remote-debugging-port=0", "--profile", profile],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        address = await _address(profile / "WebDriverBiDiServer.json")
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{address}/session", max_msg_size=0) as socket,
        ):
            tab = Tab(socket)
            await tab.send("session.new", capabilities={})
            await tab.send("session.subscribe", events=["log.entryAdded", "network.fetchError"])
            found = await tab.send("browsingContext.getTree", maxDepth=0)
            tab.context = found["contexts"][0]["context"]
            yield tab
            await tab.send("session.end")
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 10)
        except subprocess.TimeoutExpired:
            process.kill()


async def _address(file: Path, seconds: float = 60.0) -> str:
    """Where Firefox listens, which it writes into a file of its profile."""
    for _ in range(int(seconds / 0.1)):
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = json.loads(file.read_text())
            return f"ws://{found['ws_host']}:{found['ws_port']}"
        await asyncio.sleep(0.1)
    raise TimeoutError(f"Firefox did not say in {seconds} s where it listens")
