"""A headless Chromium, driven by the W3C WebDriver protocol that chromedriver speaks over HTTP."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's reference, from the standard


def installed() -> bool:
    return shutil.which("chromedriver") is not None and shutil.which("chromium") is not None


class Browser:
    """One window of a given width; use it in a ``with`` block."""

    def __init__(self, width: int, height: int = 900) -> None:
        self.width, self.height = width, height

    def __enter__(self) -> "Browser":
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                break
        self.address = f"http://127.0.0.1:{found[1]}"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options = {"args": flags, "binary": shutil.which("chromium")}
        phone = {"mobileEmulation": {"deviceMetrics": {"width": self.width, "height": self.height, "pixelRatio": 2}}}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options | (phone if self.width < 500 else {}),
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self.address += f"/session/{answer['sessionId']}"
        if self.width >= 500:
            self._post("/window/rect", {"width": self.width, "height": self.height})
        return self

    def __exit__(self, *_: object) -> None:
        urlopen(Request(self.address, method="DELETE")).close()
        self.driver.terminate()
        self.driver.wait()

    def open(self, path: Path) -> None:
        self._post("/url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """Value that a script returns."""
        return self._post("/execute/sync", {"script": script, "args": []})

    def click(self, css: str) -> None:
        """Click in the middle of the first element that the selector finds."""
        element = self._post("/element", {"using": "css selector", "value": css})[ELEMENT]
        self._post(f"/element/{element}/click", {})

    def point(self, css: str, across: float) -> None:
        """Move the pointer, on a phone tap, at a share of the width of an element, in the middle of its height."""
        self.run(f"document.querySelector({css!r}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"return document.querySelector({css!r}).getBoundingClientRect().toJSON()")
        x, y = round(box["x"] + across * box["width"]), round(box["y"] + box["height"] / 2)
        steps: list[dict[str, Any]] = [
            {"type": "pointerMove", "duration": 0, "x": x + d, "y": y, "origin": "viewport"} for d in (-3, 0)
        ]
        touch = self.width < 500
        if touch:
            steps = [steps[1], {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        pointer = {"type": "pointer", "id": "finger" if touch else "mouse", "actions": steps}
        pointer["parameters"] = {"pointerType": "touch" if touch else "mouse"}
        self._post("/actions", {"actions": [pointer]})

    def complaints(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self._post("/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        with urlopen(f"{self.address}/screenshot") as answer:
            path.write_bytes(base64.b64decode(json.load(answer)["value"]))

    def _post(self, path: str, content: dict[str, Any]) -> Any:
        body = json.dumps(content).encode()
        with urlopen(Request(self.address + path, body, {"Content-Type": "application/json"})) as answer:
            return json.load(answer)["value"]
