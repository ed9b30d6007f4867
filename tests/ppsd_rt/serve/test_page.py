"""The page in a real browser: by playwright, in a Chromium of the system or of `playwright install`."""

import os
import shutil

import pytest
from serve_support import HANG, serving

from ppsd_rt import SamplingParams
from ppsd_rt.pipeline.schedule import parse_schedule

TOKENS = 24
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
playwright = pytest.importorskip("playwright.sync_api", reason="the page's test needs playwright")
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = os.environ.get("PPSD_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
        try:
            browser = started.chromium.launch(executable_path=found, args=FLAGS)
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
        page.asked = []
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(served.url)
        page.locator("#most").evaluate(f"e => {{ e.value = {TOKENS}; e.dispatchEvent(new Event('change')); }}")
        yield page
        assert all(url.startswith((served.url, "blob:", "data:")) for url in page.asked)
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
    shown = page.locator("article[data-role=assistant] .tokens")
    assert shown.evaluate("e => e.textContent") == answer.text
    assert page.locator("article footer").last.text_content().startswith(f"cut at {TOKENS} tokens")
    assert "tokens/s, acceptance 0." in page.locator("#speed").text_content()
    assert page.evaluate("messages.length") == 2
    assert page.evaluate("document.activeElement.id") == "text"
    page.locator("#reset").press("Enter")
    assert page.locator("article").count() == 0


def test_tokens_are_coloured_on_a_switch(page):
    ask(page, "Why?")
    piece = page.locator("article .accepted").first
    plain = piece.evaluate("e => getComputedStyle(e).color")
    assert not piece.is_visible()
    page.locator("#origins").press("Space")
    assert piece.is_visible()
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


def texts(page):
    return [message["content"] for message in page.evaluate("messages")]


def wait(page):
    playwright.expect(page.locator("#stop")).to_be_disabled(timeout=HANG * 1000)


def test_an_answer_that_was_cut_goes_on_by_its_ids(page, served, engine):
    """From the keyboard: what follows is what a larger limit would have given."""
    ask(page, "Why?")
    page.get_by_role("button", name="Continue").press("Enter")
    wait(page)
    asked, schedule = [{"role": "user", "content": "Why?"}], served.service.settings.schedule
    answer = engine.generate(asked, SamplingParams(max_tokens=2 * TOKENS), schedule).run()
    assert page.evaluate("messages[1].ids") == list(answer.ids)
    assert page.locator("article footer").last.text_content().startswith(f"cut at {2 * TOKENS} tokens")


def test_without_a_limit_it_goes_to_the_end_of_the_context(page, engine):
    page.locator("summary").press("Enter")
    page.locator("#most").fill("")
    page.locator("#text").focus()
    ask(page, "Why?")
    context = engine.config.max_position_embeddings
    prompt = engine.encode([{"role": "user", "content": "Why?"}])
    assert len(prompt) + page.evaluate("messages[1].ids.length") == context


def test_an_answer_is_made_again_and_a_turn_edited(page):
    for text in ("Why?", "How?", "When?"):
        ask(page, text)
    before = texts(page)
    page.get_by_role("button", name="Regenerate").nth(1).click()
    wait(page)
    assert texts(page) == before[:4]  # greedy; what followed is forgotten
    page.get_by_role("button", name="Edit").first.click()
    assert page.locator("#text").input_value() == "Why?"
    page.locator("#text").fill("Who?")
    page.keyboard.press("Enter")
    wait(page)
    assert [len(texts(page)), texts(page)[0]] == [2, "Who?"]


def test_conversations_and_settings_outlive_a_reload(page):
    ask(page, "Why?")
    page.locator("#reset").click()
    ask(page, "How?")
    before = texts(page)
    page.reload()
    assert texts(page) == before
    assert page.locator("#most").input_value() == str(TOKENS)
    assert page.locator("article[data-role=assistant] .rendered").text_content().strip()
    assert page.locator("#kept option").all_text_contents() == ["How?", "Why?"]
    page.locator("#kept").select_option(label="Why?")
    assert texts(page)[0] == "Why?"
    page.locator("#forget").click()
    assert page.locator("#kept option").all_text_contents() == ["(new)", "How?"]


MARKDOWN = """# Title

Some *words*, `code` and a [link](https://example.org).

```python
a = 1 < 2
```

| a | b |
| - | - |
| 1 | 2 |

<img src=x onerror="errors.push(1)"><script>errors.push(2)</script> ![picture](https://example.org/a.png)
[bad](javascript:errors.push(3))"""


def shown(page, content):
    """A conversation with this answer."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "ids": [1], "end": "finished"}]
    page.evaluate("turns => { messages = turns; show(); }", turns)
    return page.locator(".rendered")


def test_markdown_is_rendered_and_nothing_of_it_runs(page):
    answer = shown(page, MARKDOWN)
    assert answer.locator("h1").text_content() == "Title"
    assert answer.locator("em").text_content() == "words"
    assert answer.locator("td").all_text_contents() == ["1", "2"]
    assert answer.locator("pre code").text_content() == "a = 1 < 2\n"
    assert answer.locator("img, script").count() == 0
    assert answer.locator("a").evaluate_all("links => links.map(e => e.href)") == [
        "https://example.org/",
        "https://example.org/a.png",  # a link instead of a picture, which would be fetched from there
    ]
    assert "<img src=x" in answer.text_content()


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
