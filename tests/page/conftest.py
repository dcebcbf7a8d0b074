from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

SETTLE_S = 15.0


class Visit:
    """A page that somebody looks at, and everything that it did in the meantime."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.said: list[str] = []
        """Errors and warnings on the console, and exceptions."""
        self.asked: list[str] = []
        """Addresses that were asked for."""
        page.on("console", lambda message: self.said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    async def text(self, selector: str) -> str:
        return await self.page.locator(selector).inner_text()

    async def until(self, script: str) -> None:
        """Wait until a JavaScript expression is true. Asked from outside: the page may evaluate nothing itself."""
        async with asyncio.timeout(SETTLE_S):
            while not await self.page.evaluate(script):
                await asyncio.sleep(0.05)

    async def color(self, selector: str, name: str) -> str:
        return str(await self.page.locator(selector).first.evaluate(f"each => getComputedStyle(each)['{name}']"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    program = shutil.which("chromium")
    assert program is not None, "these tests need Chromium: apt-get install chromium"
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        await found.close()


@pytest.fixture
def look(browser: Browser) -> Any:
    """``async with look(address, width=…, dark=…, still=…) as visit``: somebody opens the page."""

    @asynccontextmanager
    async def open_(address: str, *, width: int = 1280, dark: bool = False, still: bool = False) -> AsyncIterator[Visit]:
        context = await browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if still else "no-preference",
        )
        try:
            page = await context.new_page()
            visit = Visit(page, address)
            await page.goto(address)
            await visit.until("document.querySelector('.cell, .empty, .notice') !== null")
            yield visit
        finally:
            await context.close()

    return open_
