"""Chromium without a window, and what a page requests."""

import json
import shutil
from collections.abc import Iterator

import pytest


def opened() -> Iterator:
    """Yield a driver of Chromium; skip the test if it is not installed."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip(
            "no chromium and chromedriver: apt-get install chromium chromium-driver"
        )
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="no selenium: pip install 'transformer_jax[test]'"
    )
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1000,900",
    ):
        options.add_argument(argument)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    yield driver
    driver.quit()


def requested(browser) -> list[str]:
    """Return the URLs requested since the last call."""
    events = [
        json.loads(entry["message"])["message"]
        for entry in browser.get_log("performance")
    ]
    sent = [
        event["params"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    return [params["request"]["url"] for params in sent]
