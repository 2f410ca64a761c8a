"""One Chromium per module, and pages that ask for news quickly."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from support.browser import PATIENCE

from exporter.publish.page import renderer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a Chromium that can resolve no host but this one."""
    with sync_playwright() as driver:
        started = driver.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--no-sandbox"],
            timeout=PATIENCE,
        )
        expect.set_options(timeout=PATIENCE)
        yield started
        started.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Let open pages ask five times a second instead of every two seconds."""
    monkeypatch.setattr(renderer, "EVERY_SECONDS", 0.2)
