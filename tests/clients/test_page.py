"""The page at `/` in a headless Chromium: status, playground, reference, snippets, keys. Screenshots are kept in `.cache/test/page/`."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from conftest import BINARIES, ROOT
from serving import rank

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SHOTS = ROOT / ".cache/test/page"
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage", "--hide-scrollbars"]
DESKTOP, PHONE = (1280, 900), (360, 780)
SECTIONS = ["status", "playground", "api", "clients"]
# Clicks a hidden button in the moment in which it is shown, and notes it in `was_clicked`.
CLICK_WHEN_SHOWN = """
const button = document.getElementById(arguments[0]);
new MutationObserver((changes, observer) => {
  if (button.hidden) return;
  observer.disconnect();
  window.was_clicked = true;
  button.click();
}).observe(button, { attributes: true });
"""

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="`chromium` and `chromedriver` are not installed")


class Page:
    """A page in a browser, and what the browser logged."""

    def __init__(self, driver, address: str):
        self.driver, self.address = driver, address

    def open(self, section: str = "status"):
        self.driver.get(f"http://{self.address}/#{section}")

    def find(self, selector: str):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """The text of all elements of a selector, visible or not, read at once."""
        return self.driver.execute_script("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent).join('\\n')", selector)

    def tile(self, title: str) -> list[str]:
        """The value of a tile and the line below."""
        script = "const t = [...document.querySelectorAll('.tile')].find((t) => t.firstChild.textContent === arguments[0]); return t ? [...t.querySelectorAll('dd')].map((d) => d.textContent) : null"
        return self.driver.execute_script(script, title)

    def eventually(self, what: str, condition, seconds: float = 60):
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}; console: {self.console()}"
            time.sleep(0.05)
        return found

    def look(self, theme: str, size: tuple[int, int]):
        """Sets the colours that the user prefers, and the size of the screen."""
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def hosts(self) -> set[str]:
        """The hosts that the browser sent requests to."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [urlsplit(message["params"]["request"]["url"]) for message in messages if message["method"] == "Network.requestWillBeSent"]
        return {url.netloc for url in urls if url.scheme not in ("data", "blob")}

    def set(self, selector: str, value: str):
        field = self.find(selector)
        field.clear()
        field.send_keys(value)

    def await_model(self):
        self.eventually("a model", lambda: self.driver.execute_script("return document.getElementById('model').value") == "ensemble")

    def say(self, text: str):
        self.find("#message").send_keys(text, Keys.ENTER)

    def is_done(self) -> bool:
        return self.find("#conversation").get_attribute("aria-busy") == "false"

    def answer(self) -> str:
        """Waits for the end of the last answer, and returns its text."""
        self.eventually("an answer that has ended", lambda: self.is_done() and self.all(".message.assistant"))
        return self.driver.execute_script("return [...document.querySelectorAll('.message.assistant')].at(-1).querySelector('.text:not(.reasoning .text)').textContent")


@contextmanager
def browser(folder):
    """A browser with an empty user directory."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={folder}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def page(driver, world):
    """The page of the world. At the end, no error was logged and no other host was asked."""
    page = Page(driver, world.http)
    driver.get("about:blank")
    page.console(), page.hosts()
    page.look("light", DESKTOP)
    yield page
    assert page.console() == []
    assert page.hosts() <= {world.http}


# Keeps the lengths that the conversation has while it grows.
LENGTHS = """
window.lengths = new Set();
const box = document.getElementById("conversation");
new MutationObserver(() => window.lengths.add(box.textContent.length)).observe(box, { childList: true, subtree: true });
"""


def generate(world, max_tokens: int):
    """Generates text in the background, a request after the other, until the returned event is set."""
    ends = threading.Event()
    body = {"model": "ensemble", "prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}

    def run():
        while not ends.is_set():
            request = urllib.request.Request(f"http://{world.http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
            urllib.request.urlopen(request, timeout=120).read()

    thread = threading.Thread(target=run)
    thread.start()
    return ends, thread


def test_the_status_shows_the_model_and_numbers_that_change_under_load(page, world):
    page.open()
    page.eventually("the model", lambda: "tensorrt_llm" in page.text(".card.model h2"))
    page.eventually("ready", lambda: page.text("#state") == "ready")
    assert "2 ranks on 1 node" in page.text("#status-line")
    ends, thread = generate(world, 200)
    try:
        busy = lambda: page.tile("Running")[0] == "1" and float(page.tile("Tokens/s")[0].replace(",", "")) > 0
        page.eventually("tokens per second", busy)
        total = lambda: int(page.tile("Tokens/s")[1].split()[0].replace(",", ""))
        first = total()
        page.eventually("a growing number of tokens", lambda: total() > first)
        page.eventually("a latency", lambda: re.fullmatch(r"[\d.]+ m?s", page.tile("Between tokens")[0]))
        page.eventually("a line of the chart", lambda: page.find(".charts .line").get_attribute("d"))
    finally:
        ends.set()
        thread.join()
    page.eventually("nothing running", lambda: page.tile("Running")[0] == "0")
    workers = [row.text.split() for row in page.all("#workers tbody tr")]
    assert [row[0] for row in workers] == ["0", "1"] and all("ready" in row for row in workers), workers
    assert "ensemble" in page.text("#models")
    assert re.search(r"World started again\s*0", page.text("#faults"))
    shown = json.loads(urllib.request.urlopen(f"http://{world.http}/ui/status.json").read())
    scraped = urllib.request.urlopen(f"http://localhost:{world.metrics_port}/metrics").read().decode()
    value = shown["metrics"]["trireme_llm_output_tokens_total"][0]["value"]
    assert f'trireme_llm_output_tokens_total{{model="tensorrt_llm",version="1"}} {int(value)}' in scraped


def test_a_chat_is_streamed_with_tokens_probabilities_and_timing(page):
    page.open("playground")
    page.await_model()
    page.set("#set-max_tokens", "120")
    page.set("#set-temperature", "0")
    page.driver.execute_script(LENGTHS)
    page.say("Once upon a time there was a little cat")
    answer = page.answer()
    lengths = page.driver.execute_script("return [...window.lengths]")
    assert len(lengths) > 5, f"not streamed: {lengths}"
    assert len(answer) > 20 and page.text(".message.assistant .tokens").strip() == answer.strip()
    timing = r"first token [\d.]+ m?s · \d+ tokens · [\d.,]+ tokens/s · [\d.]+ m?s in all · prompt \d+, of these \d+ cached · end: (stop|length)"
    assert re.fullmatch(timing, page.text(".message.assistant .timing")), page.text(".message.assistant .timing")
    # The keyboard reaches each token, and its alternatives are shown.
    page.find(".tokens").send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert re.search(r"Token 2 of \d+: .*log-probability -?\d", page.text(".detail"))
    assert len(page.all(".alternatives li")) == 5
    page.find(".more button").click()
    assert page.find(".message.assistant > .text").is_displayed() and not page.find(".tokens").is_displayed()
    # The next request has the whole conversation.
    page.say("And then?")
    page.eventually("a second answer", lambda: len(page.all(".message.assistant .timing")) == 2 and page.is_done())
    sent = json.loads(page.driver.execute_script("return [...document.querySelectorAll('.more pre')].at(-1).textContent"))
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["temperature"] == 0 and sent["max_tokens"] == 120 and "top_p" not in sent
    page.find("#clear").click()
    assert not page.all(".message")


def test_a_stream_can_be_stopped(page):
    page.open("playground")
    page.await_model()
    page.set("#set-max_tokens", "100000")
    page.driver.execute_script("document.getElementById('logprobs').click()")
    # Clicked inside the page: a busy machine may answer before the driver has seen the button.
    page.driver.execute_script(CLICK_WHEN_SHOWN, "stop")
    page.say("Count")
    page.eventually("a stop button", lambda: page.driver.execute_script("return window.was_clicked"))
    page.eventually("the end", page.is_done)
    assert page.find("#send").is_enabled()


def test_a_chat_with_a_json_schema_gives_an_answer_that_follows_it(page):
    page.open("playground")
    page.await_model()
    Select(page.find("#form")).select_by_value("json_schema")
    page.eventually("the field for the schema", page.find("#schema").is_displayed)
    page.set("#set-seed", "1")
    page.say("Describe a cat.")
    schema = json.loads(page.find("#schema").get_attribute("value"))
    jsonschema.validate(json.loads(page.answer()), schema)


def test_a_call_of_one_tool_can_be_demanded(page):
    page.open("playground")
    page.await_model()
    choice = page.find("#tool-choice")
    assert not choice.is_displayed(), "without tools there is nothing to choose"
    page.find("#example-tool").click()
    page.eventually("the choice", choice.is_displayed)
    values = [option.get_attribute("value") for option in Select(choice).options]
    assert values == ["auto", "none", "required", "call get_weather"]
    Select(choice).select_by_value("call get_weather")
    page.set("#set-seed", "1")
    page.say("How is the weather?")
    page.eventually("the call", lambda: page.is_done() and page.text(".message .call").startswith("Calls get_weather"))
    assert "city" in json.loads(page.text(".message .call pre"))
    page.find("#tools").clear()
    page.eventually("no choice", lambda: not choice.is_displayed())


def test_a_request_that_is_refused_is_explained(driver, world):
    page = Page(driver, world.http)
    page.open("playground")
    driver.refresh()
    page.await_model()
    page.set("#tools", "[{")
    page.say("Hello")
    page.eventually("the reason", lambda: page.text(".message .note").startswith("Tools: "))
    page.find("#clear").click()
    page.find("#tools").clear()
    page.set("#set-temperature", "9")
    page.say("Hello")
    page.eventually("the reason", lambda: page.text(".message .note").startswith("Temperature: "))
    page.find("#clear").click()
    page.set("#set-temperature", "1")
    Select(page.find("#form")).select_by_value("json_schema")
    page.set("#schema", '{"type": "no_such_type"}')
    page.say("Hello")
    page.eventually("the server's reason", lambda: page.is_done() and "no_such_type" in page.text(".message .note"))


def test_the_reference_has_every_operation_with_its_fields(page):
    page.open("api")
    described = yaml.safe_load((ROOT / "docs/openapi.yaml").read_text())["paths"]
    operations = [(method.upper(), path) for path, methods in described.items() for method in methods]
    page.eventually("the operations", lambda: len(page.all(".operation")) == len(operations))
    shown = [tuple(part.text for part in summary.find_elements(By.CSS_SELECTOR, ".method, .path")) for summary in page.all(".operation > summary")]
    assert shown == operations
    page.all(".operation > summary")[operations.index(("POST", "/v1/chat/completions"))].click()
    rows = [row.text for row in page.all(".operation[open] > .scroll tbody tr")]
    assert any(row.startswith("messages") and " yes" in row for row in rows) and any(row.startswith("top_p number 0 to 1") for row in rows), rows


def test_every_snippet_runs_as_it_is_shown(page, world, tmp_path):
    page.open("clients")
    page.eventually("snippets with the model", lambda: '"ensemble"' in page.text(".snippet code") and str(world.grpc_port) in page.text(".snippet code"))
    titles = page.text(".snippet h2").split("\n")
    codes = page.driver.execute_script("return [...document.querySelectorAll('.snippet code')].map((code) => code.textContent)")
    environment = os.environ | {"PATH": f"{BINARIES}:{os.environ['PATH']}"}
    packages = ROOT / ".cache/node_clients"
    ran = []
    for title, code in zip(titles, codes, strict=True):
        folder = tmp_path
        if title.startswith("Python"):
            command = [sys.executable, "-c", code]
        elif title.startswith("Node"):
            if not (shutil.which("node") and (packages / "node_modules/openai").exists()):
                continue
            folder = packages
            command = ["node", "--input-type=module", "-e", code]
        else:
            command = ["bash", "-c", code]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0 and len(ended.stdout) > 20 and '"error"' not in ended.stdout, f"{title}: {ended}"
        ran.append(title)
    assert len(ran) >= len(titles) - 1 and len(titles) == 7, ran


def names_of_controls(page) -> list[str]:
    """The accessible names of what can be used with the keyboard and is visible."""
    return [control.accessible_name for control in page.all("button, input, select, textarea, a, [tabindex='0']") if control.is_displayed()]


# The lowest contrast of visible texts against the colour behind them, by WCAG's formula, with that text.
CONTRAST = """
const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const colour = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return text.startsWith("color(srgb") ? [n[0] * 255, n[1] * 255, n[2] * 255, n[3] ?? 1] : [n[0], n[1], n[2], n[3] ?? 1]; };
const behind = (e) => { for (; e; e = e.parentElement) { const c = colour(getComputedStyle(e).backgroundColor); if (c[3] > 0) return c; } return [255, 255, 255]; };
let worst = [99, ""];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
  if (!text || !e.checkVisibility() || !e.getClientRects().length) continue;
  const [a, b] = [light(colour(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < worst[0]) worst = [ratio, text];
}
return worst;
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_section_is_legible_and_fits_a_phone(page, world, theme):
    SHOTS.mkdir(parents=True, exist_ok=True)
    ends, thread = generate(world, 200)
    try:
        for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
            page.driver.get("about:blank")
            page.look(theme, size)
            page.open("status")
            page.eventually("figures", lambda: page.tile("Running") and page.tile("Running")[0] == "1" and page.tile("Between tokens")[0] != "–")
            for section in SECTIONS:
                page.driver.execute_script(f"location.hash = '#{section}'")
                page.eventually(section, page.find(f"#{section}").is_displayed)
                if section == "playground":
                    page.await_model()
                    page.say("Once upon a time there was a little cat")
                    page.eventually("tokens", lambda: page.is_done() and page.all(".token"))
                    page.find(".tokens").send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
                if section == "api":
                    page.eventually("operations", lambda: page.all(".operation > summary"))
                    page.all(".operation > summary")[4].click()
                if section == "status":
                    time_of_charts = page.driver.execute_script("return document.querySelector('.charts .line').getAttribute('d').length")
                    page.eventually("charts", lambda: page.driver.execute_script("return document.querySelector('.charts .line').getAttribute('d').length") > time_of_charts + 40)
                page.driver.execute_script("scrollTo(0, 0)")
                width = page.driver.execute_script("return document.documentElement.scrollWidth")
                assert width <= size[0], f"{section} is {width} pixels wide on a screen of {size[0]}"
                assert all(names_of_controls(page)), names_of_controls(page)
                contrast, text = page.driver.execute_script(CONTRAST)
                assert contrast >= 4.5, f"{section}, {theme}: {contrast:.2f} for `{text}`"
                page.driver.save_screenshot(str(SHOTS / f"{section}-{theme}-{name}.png"))
    finally:
        ends.set()
        thread.join()


def test_the_page_asks_for_a_key_and_keeps_it_in_memory_only(driver, tmp_path):
    with rank(tmp_path, "--http-restricted-api=metadata,metrics,inference:authorization=s3cret", prefix="page") as server:
        page = Page(driver, server.http)
        page.open()
        page.eventually("the dialog", page.find("#key-dialog").is_displayed)
        assert "expecting header 'authorization'" in page.text("#key-reason")
        page.find("#key-dialog .quiet").click()
        page.eventually("what is missing", lambda: "needs an API key" in page.text("#status-note"))
        page.find("#status-note button").click()
        page.eventually("the dialog", page.find("#key-dialog").is_displayed)
        page.find("#key-value").send_keys("s3cret", Keys.ENTER)
        page.eventually("the status", lambda: page.text("#state") == "ready" and "identity" in page.text("#models"))
        kept = driver.execute_script("return [localStorage.length, sessionStorage.length, document.cookie, document.body.outerHTML.includes('s3cret')]")
        assert kept == [0, 0, "", False]
        driver.refresh()
        page.eventually("the dialog again", page.find("#key-dialog").is_displayed)


def test_the_page_can_be_turned_off(tmp_path):
    with rank(tmp_path, "--allow-page=false", prefix="nopage") as server:
        for path in ("/", "/ui", "/ui/status.json"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"http://{server.http}{path}", timeout=60)
        assert urllib.request.urlopen(f"http://{server.http}/v2", timeout=60).status == 200
