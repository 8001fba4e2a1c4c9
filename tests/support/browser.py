"""A real Chromium, and visits to our page in it that note what must never happen there."""

import asyncio
import fcntl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright, expect

from support.node_process import PACKAGES

PATIENCE_MS = 15_000
AXE_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# Meant for machines with one short task: the browser would end with its first profile.
ONE_PROCESS = ("--single-process", "--no-zygote")
UNPACK = """
import chromium from "@sparticuz/chromium";
console.log(JSON.stringify({path: await chromium.executablePath(), args: chromium.args}));
"""
# Playwright runs it before the page's own scripts, in every document.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample}`);
});
"""


@cache
def _unpacked() -> dict[str, Any]:
    """Where the package has unpacked its Chromium, and the arguments that it needs without root. It takes a file that
    another process is still unpacking for its own, so one at a time unpacks."""
    import json  # noqa: PLC0415

    node = Path(sys.prefix) / "bin" / "node"
    with (Path(gettempdir()) / "anabranch-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = subprocess.run(
            [str(node), "--input-type=module", "-e", UNPACK], cwd=PACKAGES, capture_output=True, text=True, check=True
        )
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    found = await asyncio.to_thread(_unpacked)
    async with async_playwright() as playwright:
        args = [one for one in found["args"] if one not in ONE_PROCESS]
        browser = await playwright.chromium.launch(executable_path=found["path"], args=args, headless=True)
        try:
            yield browser
        finally:
            await browser.close()


class Visit:
    """One page in a browser profile of its own."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.outside: list[str] = []
        self.errors: list[str] = []
        page.on("request", self._requested)
        page.on("console", self._printed)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda shown: self.errors.append(f"dialog: {shown.message}"))

    def _requested(self, request: Request) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.outside.append(request.url)

    def _printed(self, message: ConsoleMessage) -> None:
        # Chromium prints every response with an error status; the page shows those in words.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)

    async def open(self, address: str = "") -> None:
        await self.page.goto(f"{self.url}/{address}")

    async def ask(self, question: str) -> None:
        await self.page.get_by_label("Question").fill(question)
        await self.page.keyboard.press("Enter")

    async def answered(self, count: int = 1) -> None:
        await expect(self.page.locator(".turn.over")).to_have_count(count)

    async def violations_of_accessibility(self, *, colors: bool = True, others: bool = True) -> list[str]:
        """What axe-core finds on the screen as it is: by the rule about colors (the slowest one), and by the others."""
        if not await self.page.evaluate("() => Boolean(window.axe)"):
            await self.page.evaluate((PACKAGES / "node_modules/axe-core/axe.min.js").read_text())
        chosen = {"type": "tag", "values": AXE_RULES} if others else {"type": "rule", "values": ["color-contrast"]}
        options = {"runOnly": chosen, "rules": {"color-contrast": {"enabled": colors}}}
        found = await self.page.evaluate("(options) => axe.run(document, options)", options)
        return [
            f"{one['id']}: {node['target']} {node['failureSummary']}"
            for one in found["violations"]
            for node in one["nodes"]
        ]

    async def check(self) -> None:
        """Nothing left the origin, nothing was blocked by the policy, and no script failed."""
        assert self.outside == []
        assert await self.page.evaluate("() => window.violations") == []
        assert self.errors == []


@asynccontextmanager
async def visit(browser: Browser, url: str, **options: Any) -> AsyncIterator[Visit]:
    """A visit; it is checked at its end, unless the test has failed already."""
    # Without motion there is less to paint: there is no graphics card here.
    given = {"viewport": {"width": 1280, "height": 820}, "reduced_motion": "reduce", **options}
    context = await browser.new_context(**given)
    try:
        context.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        await context.add_init_script(WATCH)
        made = Visit(await context.new_page(), url)
        yield made
        await made.check()
    finally:
        await context.close()
