# SPDX-License-Identifier: Apache-2.0
"""The page at / in a real browser, before a real split: it chats, and shows engines, lanes, pool and latencies.

Needs Chromium and playwright (`apt install chromium`, `pip install playwright`).
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from conftest import Cluster

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine"),
]


@pytest.fixture
def page() -> Any:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1180, "height": 860})
        page.troubles = []
        page.on("console", lambda said: page.troubles.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: page.troubles.append(str(error)))
        page.hosts = set()
        page.on("request", lambda request: page.hosts.add(httpx.URL(request.url).netloc.decode()))
        yield page
        browser.close()


def test_a_chat_and_the_state_of_the_split(cluster: Cluster, page: Any) -> None:
    split = cluster.split("shm")
    page.goto(f"{split.ce.url}/")
    see = playwright.expect
    see(page.locator("#state")).to_have_text("ce: ready", timeout=30_000)
    see(page.locator("#model")).to_have_text("tiny")
    see(page.locator("#lanes")).to_contain_text("shm")
    see(page.locator("#lanes")).to_contain_text(re.compile(r"\d+\.\d GB/s"))
    see(page.locator("#engines")).to_contain_text(split.pe.url)
    page.locator("summary").click()
    page.fill("#most", "20")
    page.fill("#words", "Tell me of the sea. <img src=x onerror=alert(1)>")
    page.press("#words", "Enter")
    see(page.locator("#count")).to_have_text(re.compile(r"^\d+$"), timeout=60_000)
    see(page.locator("#route")).to_have_text("remote")
    see(page.locator("#ttft")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    see(page.locator("#itl")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    see(page.locator(".turn")).to_have_count(2)
    assert page.locator(".turn >> nth=1").inner_text().strip() != "model"
    # What was said is text, not markup.
    assert page.locator(".turn img").count() == 0
    see(page.locator("#all-ttft")).to_have_text(re.compile(r"^[\d.]+ m?s$"), timeout=10_000)
    see(page.locator("#pools")).to_contain_text("pages")
    # An error is shown, and the talk goes on.
    page.fill("#most", "1000000")
    page.fill("#words", "Too much?")
    page.click("#send")
    see(page.locator(".turn .bad")).to_contain_text("limited to 640", timeout=30_000)
    page.fill("#most", "8")
    page.fill("#words", "Once more")
    page.click("#send")
    see(page.locator(".turn")).to_have_count(6)
    see(page.locator("#send")).to_be_enabled(timeout=30_000)
    assert page.hosts == {httpx.URL(split.ce.url).netloc.decode()}
    assert [trouble for trouble in page.troubles if "400" not in trouble] == []
