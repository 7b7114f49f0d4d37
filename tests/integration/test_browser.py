"""The attention report in headless Chromium, opened from a file and used with a
mouse or by touch.
"""

import numpy as np
import pytest

from helpers import chromium
from transformer_jax.report.attention import Sentence, write_report
from transformer_jax.training.evaluation import AttentionMap
from transformer_jax.training.task import Picture

EVIL = "</script><img src=x onerror=\"document.title='broken out'\">"
SOURCE, TARGET = ["ein", "Haus", EVIL, "</s>"], ["<s>", "a", "house"]


@pytest.fixture(scope="module")
def browser():
    yield from chromium.opened()


@pytest.fixture
def page(browser, tmp_path):
    from selenium.webdriver.support.wait import WebDriverWait

    draw = np.random.default_rng(0)

    def weights(layers, heads, rows, columns):
        found = draw.random((layers, heads, rows, columns))
        return found / found.sum(axis=-1, keepdims=True)

    cross = AttentionMap(
        "decoder over encoder",
        TARGET,
        SOURCE,
        weights(2, 3, 3, 4),
        {"source": EVIL, "target": "a house"},
    )
    own = AttentionMap("encoder", SOURCE, SOURCE, weights(2, 3, 4, 4))
    alignment = AttentionMap("alignment", ["x"], ["y", "z"], weights(1, 1, 1, 2))
    write_report(
        tmp_path / "report.html",
        "A title",
        [Sentence(EVIL, [cross, own]), Sentence("second", [alignment])],
    )
    browser.get((tmp_path / "report.html").as_uri())
    WebDriverWait(browser, 10).until(
        lambda browser: browser.find_elements("css selector", "#heads button")
    )
    yield browser, {map.name: map for map in (cross, own, alignment)}
    assert [
        entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"
    ] == []
    # nothing comes from a network
    assert {url.partition(":")[0] for url in chromium.requested(browser)} == {"file"}


def test_what_is_requested_is_seen(browser, tmp_path):
    """Requests must be visible, or the other tests would prove nothing."""
    (tmp_path / "page.html").write_text('<img src="http://127.0.0.1:9/picture.png">')
    browser.get((tmp_path / "page.html").as_uri())
    assert "http://127.0.0.1:9/picture.png" in chromium.requested(browser)
    browser.get_log("browser")


def choose(browser, name, text):
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", name)).select_by_visible_text(text)


def cell(browser, row, column):
    return browser.find_element(
        "css selector", f'td[data-row="{row}"][data-column="{column}"]'
    )


def point(browser, element, kind):
    """Move the mouse over an element, or touch it with a finger."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.action_builder import ActionBuilder
    from selenium.webdriver.common.actions.pointer_input import PointerInput

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    if kind == "mouse":
        ActionChains(browser).move_to_element(element).perform()
        return
    actions = ActionBuilder(browser, mouse=PointerInput("touch", "finger"))
    actions.pointer_action.move_to(element).pointer_down().pointer_up()
    actions.perform()


def said(browser):
    return browser.find_element("id", "said").text


def marked(browser):
    return [element.text for element in browser.find_elements("css selector", "th.on")]


@pytest.mark.parametrize("kind", ["mouse", "touch"])
def test_pointing_marks_both_words_and_tells_the_number(page, kind):
    browser, maps = page
    weights = maps["decoder over encoder"].weights
    point(browser, cell(browser, 2, 1), kind)
    assert (
        said(browser) == f"house → Haus: {round(255 * weights[0, 0, 2, 1]) / 255:.2f}"
    )
    assert marked(browser) == ["Haus", "house"]
    point(browser, cell(browser, 0, 2), kind)
    assert said(browser).startswith(f"<s> → {EVIL}")
    assert len(marked(browser)) == 2


def test_layers_and_heads_with_their_entropies(page):
    browser, maps = page
    weights = maps["decoder over encoder"].weights
    buttons = browser.find_elements("css selector", "#heads button")
    entropies = -(weights * np.log2(weights)).sum(axis=-1).mean(axis=-1)
    assert all(button.text.endswith(" bits") for button in buttons)
    shown = [float(button.text.removesuffix(" bits")) for button in buttons]
    np.testing.assert_allclose(shown, entropies.reshape(-1), atol=0.006)
    buttons[5].click()  # layer 2, head 3
    assert [button.get_attribute("aria-pressed") for button in buttons] == [
        "false"
    ] * 5 + ["true"]
    point(browser, cell(browser, 1, 0), "mouse")
    assert said(browser) == f"a → ein: {round(255 * weights[1, 2, 1, 0]) / 255:.2f}"


def test_sentences_and_maps(page):
    browser, maps = page
    choose(browser, "map", "encoder")
    assert len(browser.find_elements("css selector", "td[data-row]")) == 16
    browser.find_elements("css selector", "#heads button")[5].click()
    choose(browser, "sentence", "second")
    assert len(browser.find_elements("css selector", "#heads button")) == 1
    point(browser, cell(browser, 0, 1), "mouse")
    assert (
        said(browser)
        == f"x → z: {round(255 * maps['alignment'].weights[0, 0, 0, 1]) / 255:.2f}"
    )


def test_text_stays_text(page):
    browser, _ = page
    assert browser.title == "A title"
    assert browser.find_elements("css selector", "img") == []
    heads = [
        th.get_attribute("textContent")
        for th in browser.find_elements("css selector", "thead th")
    ]
    assert heads == SOURCE
    assert browser.find_element("id", "texts").text.splitlines() == [
        "source",
        EVIL,
        "target",
        "a house",
    ]


def test_light_and_dark(page):
    browser, _ = page

    def brightness():
        color = browser.execute_script(
            "return getComputedStyle(document.body).backgroundColor"
        )
        return sum(int(part) for part in color.strip("rgb()").split(",")) / 3

    for scheme, bright in (("light", True), ("dark", False)):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        assert (brightness() > 128) == bright


def test_a_browser_that_cannot_unpack_says_so(browser, tmp_path):
    maps = [AttentionMap("alignment", ["x"], ["y"], np.ones((1, 1, 1, 1)))]
    write_report(tmp_path / "report.html", "t", [Sentence("s", maps)])
    lacking = {"source": "delete window.DecompressionStream"}
    script = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", lacking)
    browser.get((tmp_path / "report.html").as_uri())
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    assert "cannot decompress the weights: ReferenceError" in said(browser)


def test_a_picture_is_bright_where_a_word_looks(browser, tmp_path):
    """Two words on a white picture of two parts: each looks at one of them."""
    from selenium.webdriver.support.wait import WebDriverWait

    white = np.full((20, 40, 3), 255, np.uint8)
    weights = np.array([[1.0, 0.0], [0.25, 0.75]])[None, None]
    found = AttentionMap(
        "alignment", ["a", "dog"], ["1,1", "1,2"], weights, {}, Picture(1, 2, white)
    )
    write_report(tmp_path / "r.html", "A title", [Sentence("dog.jpg", [found])])
    browser.get((tmp_path / "r.html").as_uri())
    WebDriverWait(browser, 10).until(
        lambda browser: len(browser.find_elements("css selector", "canvas")) >= 2
    )
    read = """
        return [...document.querySelectorAll("#pictures canvas")].map(canvas => {
            const pen = canvas.getContext("2d");
            const y = canvas.height / 2;
            const red = x => pen.getImageData(x * canvas.width, y, 1, 1).data[0];
            return [red(0.25), red(0.75)];
        });
    """
    WebDriverWait(browser, 10).until(lambda browser: browser.execute_script(read)[0][0])
    first, second = browser.execute_script(read)[:2]
    assert first[0] == 255
    assert first[1] < 100
    assert second[0] < second[1] == 255
