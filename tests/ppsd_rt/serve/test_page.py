"""The page in a real browser: by playwright, in a Chromium of the system or of `playwright install`."""

import os
import shutil

import pytest
from serve_support import HANG, serving

from ppsd_rt import SamplingParams
from ppsd_rt.pipeline.schedule import parse_schedule

TOKENS = 24
playwright = pytest.importorskip("playwright.sync_api", reason="the page's test needs playwright")
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = os.environ.get("PPSD_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
        try:
            browser = started.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        except playwright.Error as error:
            pytest.skip(f"there is no Chromium: {error}")
        yield browser
        browser.close()


@pytest.fixture
def page(browser, served):
    with browser.new_page() as page:
        page.set_default_timeout(HANG * 1000)
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda said: page.errors.append(said.text) if said.type == "error" else None)
        page.goto(served.url)
        page.locator("#most").evaluate(f"e => e.value = {TOKENS}")
        yield page
        # The browser reports every status that is none of success.
        assert [error for error in page.errors if "Failed to load resource" not in error] == []


def ask(page, text):
    page.keyboard.type(text)  # the field has the focus
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#stop")).to_be_disabled(timeout=HANG * 1000)


def test_a_conversation_by_keyboard(page, served, engine):
    assert page.title() == "ppsd-rt"
    playwright.expect(page.locator("#model")).to_have_text("tiny", timeout=HANG * 1000)
    ask(page, "Why?")
    params = SamplingParams(max_tokens=TOKENS)
    asked = [{"role": "user", "content": "Why?"}]
    answer = engine.generate(asked, params, served.service.settings.schedule).run()
    shown = page.locator("article[data-role=assistant] div")
    assert shown.evaluate("e => e.textContent") == answer.text
    assert "tokens/s, acceptance 0." in page.locator("#speed").text_content()
    assert page.evaluate("messages.length") == 2
    assert page.evaluate("document.activeElement.id") == "text"
    page.locator("#reset").press("Enter")
    assert page.locator("article").count() == 0


def test_tokens_are_coloured_on_a_switch(page):
    ask(page, "Why?")
    piece = page.locator("article .accepted").first
    plain = piece.evaluate("e => getComputedStyle(e).color")
    page.locator("#origins").press("Space")
    assert piece.evaluate("e => getComputedStyle(e).color") != plain
    assert page.locator("#legend").is_visible()
    colours = page.evaluate("[...document.querySelectorAll('#legend li')].map(e => getComputedStyle(e).color)")
    assert len(set(colours)) == len(colours)
    assert page.locator("article .corrected").count() > 0


def test_errors_are_shown(page):
    page.locator("summary").press("Enter")
    page.locator("#most").fill("0")
    page.locator("#text").focus()
    ask(page, "Why?")
    assert "Invalid value for 'max_tokens'" in page.locator("article .error").text_content()
    assert page.evaluate("messages.length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(browser, served, scheme):
    """Contrast of every colour against its background, by WCAG 2: 4.5 at least."""
    with browser.new_page(color_scheme=scheme) as page:
        page.goto(served.url)
        page.locator("#origins").check()
        found = page.evaluate(
            """() => {
                const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
                const light = colour => {
                    probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
                    const [r, g, b] = [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255)
                        .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
                    return .2126 * r + .7152 * g + .0722 * b;
                };
                const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
                const back = light(getComputedStyle(document.body).backgroundColor);
                const soft = light(getComputedStyle(document.querySelector("header")).backgroundColor);
                return [...document.querySelectorAll("#legend li"), document.body].flatMap(e => {
                    const front = light(getComputedStyle(e).color);
                    return [ratio(front, back), ratio(front, soft)];
                });
            }"""
        )
        assert min(found) >= 4.5


def test_escape_stops_an_answer(browser, holding):
    with serving(holding, schedule=parse_schedule("plain")) as served, browser.new_page() as page:
        page.goto(served.url)
        page.keyboard.type("Why?")
        page.keyboard.press("Enter")
        assert holding.begun.acquire(timeout=HANG)
        page.keyboard.press("Escape")
        playwright.expect(page.locator("#stop")).to_be_disabled(timeout=HANG * 1000)
        assert served.answered()["finish"] == "cancelled"
        assert page.locator("article .error").count() == 0
