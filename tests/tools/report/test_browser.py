"""The page in a real Chromium: charts, tables, slider, keyboard, phone width, contrast, and nothing that injects."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoamp.tools import write_report
from tests.tools.report.runs import EVIL, many, train

pytestmark = pytest.mark.browser

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
REQUIRED = os.environ.get("AUTOAMP_CLIENTS") == "required"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    handle, _ = train(14, faults=(4, 9))
    document = handle.report()
    handle.deactivate()
    path = tmp_path_factory.mktemp("pages") / "report.html"
    write_report(path, many(document))
    return path


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    if (CHROMIUM is None or DRIVER is None) and not REQUIRED:
        pytest.skip("chromium and chromedriver are not installed")
    assert CHROMIUM, "apt-get install chromium chromium-driver"
    assert DRIVER, "apt-get install chromium chromium-driver"
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield started
    started.quit()


@pytest.fixture
def shown(driver: Any, page: Path) -> Any:
    return show(driver, page)


def show(driver: Any, page: Path, *, width: int = 1200, dark: bool = False) -> Any:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.get(page.as_uri())
    return driver


def one(driver: Any, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def column(driver: Any, table: str, number: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll(`[data-table=${arguments[0]}] tbody tr`)]"
        ".map(row => row.cells[arguments[1]].textContent)"
    )
    return list(driver.execute_script(script, table, number))


SERIES = (
    "return Object.fromEntries([...document.querySelectorAll(`[data-chart=${arguments[0]}] g`)].map("
    "g => [g.dataset.series, [...g.children].map(mark => mark.textContent)]))"
)


def test_charts_have_data_names_do_not_inject_and_nothing_is_wrong(shown: Any) -> None:
    timeline = shown.execute_script(SERIES, "timeline")
    assert timeline["skip: half-precision op"] == ["step 4: skip: half-precision op", "step 9: skip: half-precision op"]
    exponents = shown.execute_script(SERIES, "exponents")
    assert {name for name, bars in exponents.items() if len(bars) > 3} == {"results", "gradients times scale"}
    assert shown.execute_script("return window.injected") is None
    assert shown.title == f"autoamp: {EVIL}"
    assert EVIL in one(shown, ".skips").text
    assert shown.get_log("browser") == []


def test_filter_sort_and_pages_of_ten_thousand_call_sites(shown: Any) -> None:
    assert column(shown, "casts", 0)[:2] == ["op9999", "op9998"]
    status = one(shown, "[data-table=casts] [role=status]")
    assert status.text == "1 to 25 of 10,000"
    shown.execute_script("document.querySelectorAll('[data-table=casts] th button')[5].click()")
    shown.execute_script("document.querySelectorAll('[data-table=casts] th button')[5].click()")
    assert column(shown, "casts", 5)[1:3] == ["1", "2"]
    assert one(shown, "[data-table=casts] th[aria-sort]").get_attribute("aria-sort") == "ascending"
    one(shown, "[data-table=casts] input").send_keys("op77 layers")
    assert status.text == "1 to 25 of 111"
    shown.execute_script("document.querySelectorAll('[data-table=casts] .tools button')[1].click()")
    assert status.text == "26 to 50 of 111"
    assert shown.execute_script("return document.querySelectorAll('[data-table=casts] tbody tr').length") == 25


def test_the_slider_moves_gradients_alone(shown: Any) -> None:
    def histogram() -> list[list[int]]:
        script = (
            "return [...document.querySelectorAll('[data-chart=exponents] g')].map("
            "g => [...g.children].map(bar => Number(bar.dataset.x)))"
        )
        return list(shown.execute_script(script))

    results, gradients = histogram()
    slider = one(shown, ".scale")
    assert slider.get_attribute("value") == "6"
    # By the keyboard.
    slider.send_keys("\ue014" * 3)
    assert one(shown, ".scale-out").text == "2^9 = 512"
    assert histogram() == [results, [exponent + 3 for exponent in gradients]]
    shown.execute_script("document.querySelector('[data-table=values] tbody button').click()")
    assert one(shown, ".losses p").text.startswith("Shown: ")
    assert len(histogram()) == 1


@pytest.mark.parametrize("width", [360, 390, 768])
def test_nothing_scrolls_sideways(width: int, driver: Any, page: Path) -> None:
    shown = show(driver, page, width=width)
    assert shown.execute_script("return document.documentElement.scrollWidth") <= width
    wide = shown.execute_script(
        "return [...document.querySelectorAll('main *')].filter(e => e.scrollWidth > e.clientWidth + 1 && "
        "['auto', 'scroll'].includes(getComputedStyle(e).overflowX)).map(e => e.className)"
    )
    assert wide == []


CONTRAST = """
const light = c => {
  const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(
    v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const back = e => {
  for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(c)) return c;
  }
  return 'rgb(255, 255, 255)';
};
const says = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
return [...document.querySelectorAll('main *, header *')].filter(
  e => says(e) && !e.closest('svg, :disabled, script') && e.getClientRects().length
).map(e => {
  const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x);
  return [(a + 0.05) / (b + 0.05), e.tagName + '.' + e.className];
}).filter(([ratio]) => ratio < 4.5);
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out(dark: bool, driver: Any, page: Path) -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5 to 1."""
    shown = show(driver, page, dark=dark)
    background = shown.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 29)" if dark else "rgb(255, 255, 255)")
    assert shown.execute_script(CONTRAST) == []
