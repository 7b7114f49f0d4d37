"""The built site in headless Chromium, on a wide and a narrow screen."""

import functools
import http.server
import threading

import pytest

from helpers import ROOT, chromium

SITE = ROOT / "docs" / "_build" / "html"
PAGES = [
    "index",
    "configuration",  # long paths in a table
    "results/translation",
    "api/transformer_jax.models",
    "api/transformer_jax.training",
    *sorted(f"book/{path.stem}" for path in (ROOT / "docs" / "book").glob("*.md")),
]
WIDTHS = [1400, 390]  # pixels of CSS: a desktop, a phone


@pytest.fixture(scope="module")
def address():
    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built: run scripts/docs.sh")
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def browser(address):
    yield from chromium.opened()


@pytest.fixture(params=WIDTHS)
def screen(request, browser):
    """A browser of this width. Windows of Chromium cannot be as narrow as a phone."""
    metrics = {"width": request.param, "height": 900, "deviceScaleFactor": 1}
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        metrics | {"mobile": request.param < 600},
    )
    browser.get_log("browser")
    chromium.requested(browser)
    return browser


def wait(browser, script):
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 20).until(
        lambda browser: browser.execute_script(script)
    )


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_and_needs_no_network(screen, address, page):
    screen.get(f"{address}/{page}.html")
    wait(screen, "return document.readyState == 'complete'")
    assert_fits(screen)
    assert {url for url in chromium.requested(screen) if outside(url, address)} == set()
    severe = [row for row in screen.get_log("browser") if row["level"] == "SEVERE"]
    # no icon, and what the theme says at the first visit
    known = ("favicon", "Got invalid theme mode")
    assert [row for row in severe if not mentions(row["message"], known)] == []


def assert_fits(browser):
    root = "document.documentElement"
    scrolled, width = browser.execute_script(
        f"return [{root}.scrollWidth, {root}.clientWidth]"
    )
    assert scrolled <= width, "the page scrolls sideways"


def mentions(message: str, words) -> bool:
    return any(word in message for word in words)


def outside(url: str, address: str) -> bool:
    return not url.startswith((address, "data:", "blob:"))


def test_equations_are_typeset(screen, address):
    screen.get(f"{address}/book/scaled_dot_product.html")
    assert wait(screen, "return document.querySelectorAll('.katex').length") > 5
    assert not screen.execute_script(
        "return document.querySelectorAll('.katex-error').length"
    )


def test_search_finds_pages(screen, address):
    screen.get(f"{address}/search.html?q=attention")
    # results come one after another
    assert wait(
        screen,
        "return document.querySelector('.search-summary').innerText.includes('found') "
        "&& document.querySelectorAll('ul.search li').length > 5",
    )
    assert_fits(screen)
    assert {url for url in chromium.requested(screen) if outside(url, address)} == set()


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_is_readable_in_both_modes(browser, address, mode):
    browser.get(f"{address}/book/scaled_dot_product.html")
    wait(browser, "return document.readyState == 'complete'")
    browser.execute_script(f"document.documentElement.dataset.theme = '{mode}'")
    for selector in ("article p", "article table", "article .highlight pre"):
        assert contrast(browser, selector) > 4.5, selector  # WCAG 2.1, 1.4.3


def contrast(browser, selector: str) -> float:
    """Return the contrast of an element's text and the background behind it."""
    colours = browser.execute_script(
        """
        let element = document.querySelector(arguments[0]);
        const colours = [getComputedStyle(element).color];
        while (element) {
          const colour = getComputedStyle(element).backgroundColor;
          if (colour != 'rgba(0, 0, 0, 0)') { colours.push(colour); break; }
          element = element.parentElement;
        }
        return colours.map(colour => colour.match(/[0-9.]+/g).slice(0, 3).map(Number));
        """,
        selector,
    )
    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)


def luminance(colour) -> float:
    """Return the relative luminance of sRGB values of 0 to 255, as WCAG defines it."""
    parts = [value / 255 for value in colour]
    linear = [
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
    ]
    weights = (0.2126, 0.7152, 0.0722)
    return sum(weight * part for weight, part in zip(weights, linear, strict=True))
