"""The page of a report in a browser logs no error, and reacts to the pointer and to clicks."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking")
FLAGS += ("disable-component-update", "disable-sync")
WORST, SECOND, BEST, THIRD = NAMES = ["<b>|$&", "_low & 50%", "base/line", r"$\nosuch$"]
MISSING = "no browser: apt-get install chromium chromium-driver"
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)


@pytest.fixture(scope="module", params=[500, 1200], ids=["phone", "desktop"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="no browser: pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    profile = tmp_path_factory.mktemp("profile")
    for flag in (*FLAGS, f"user-data-dir={profile}", f"window-size={request.param},900"):
        options.add_argument(f"--{flag}")
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as driver:
        yield driver


@pytest.fixture
def browser(driver: Any, hostile_report: Path) -> Iterator[Any]:
    driver.get(hostile_report.as_uri())
    yield driver
    assert driver.get_log("browser") == []


def point(browser: Any, fraction: float) -> list[list[str]]:
    """Move the pointer to a fraction of the figure's width. Return the legend's caption and the cells of its rows."""
    browser.execute_script(
        "const over = document.querySelector('.figure .u-over'), box = over.getBoundingClientRect();"
        "over.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: box.left + box.width * arguments[0],"
        "clientY: box.top + box.height / 2}))",
        fraction,
    )
    return browser.execute_async_script(
        "requestAnimationFrame(() => setTimeout(arguments[0], 50, [...document.querySelector('.legend')"
        ".querySelectorAll('caption, tr')].map(r => [...(r.cells ?? [r])].map(cell => cell.textContent))))"
    )


def pixels(browser: Any) -> str:
    """The drawn figure as a data URL."""
    return browser.execute_script("return document.querySelector('.figure canvas').toDataURL()")


def click(browser: Any, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def test_a_figure_is_drawn_and_fits_the_window(browser: Any, hostile_report: Path) -> None:
    assert hostile_report.stat().st_size < 2 * 2**20
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


def test_the_pointer_shows_values_spread_and_seeds_in_a_legend_that_does_not_move(browser: Any) -> None:
    def boxes() -> list[list[float]]:
        return browser.execute_script(
            "return [...document.querySelectorAll('.legend td, .plot canvas')].map(e => e.getBoundingClientRect())"
            ".map(({x, y, width, height}) => [x, y, width, height])"
        )

    caption, _, *first = point(browser, 0.03)
    assert caption == ["at 64 tokens (1×)"]
    before = boxes()
    caption, titles, *rows = point(browser, 0.97)
    assert caption == ["at 512 tokens (8×)"]
    assert titles == ["", "mean", f"÷ {BEST}", "seeds"]
    assert [row[0] for row in first] == [row[0] for row in rows] == NAMES
    assert rows[2] == [BEST, "17.19 ± 0.012", "–", "17.18, 17.20"]
    assert rows[1][2] == "1.052 [1.049, 1.056]"  # Welch, two seeds each: 4.303 · 0.1% / √2
    assert boxes() == before
    assert browser.execute_script("return document.querySelector('.legend .best').textContent") == rows[2][1]


def test_a_click_on_a_name_hides_its_curve_and_the_pointer_on_a_name_fades_the_others(browser: Any) -> None:
    name, before = ".legend tr:nth-child(3) button", pixels(browser)
    assert browser.execute_script("return document.querySelector(arguments[0]).textContent", name) == WORST
    click(browser, name)
    assert (hidden := pixels(browser)) != before
    assert browser.execute_script("return document.querySelector(arguments[0]).ariaPressed", name) == "false"
    click(browser, name)
    assert (shown := pixels(browser)) != hidden
    event = "document.querySelector('.legend tr:nth-child(4)').dispatchEvent(new MouseEvent(arguments[0]))"
    browser.execute_script(event, "mouseenter")
    assert pixels(browser) != shown
    browser.execute_script(event, "mouseleave")
    assert pixels(browser) == shown


@pytest.mark.parametrize(("select", "option"), [(".axis", 1), (".axis", 2), (".axis", 3), (".protocol", 1)])
def test_another_protocol_or_axis_is_drawn(browser: Any, select: str, option: int) -> None:
    before = pixels(browser)
    browser.execute_script(
        f"const s = document.querySelector('.figure {select}'); s.selectedIndex = {option};"
        "s.dispatchEvent(new Event('change'))"
    )
    assert pixels(browser) != before


def test_a_click_sorts_a_table_by_numbers_and_back(browser: Any) -> None:
    def names() -> list[str]:
        return browser.execute_script(
            "return document.querySelector('table.dataframe tbody').innerText.split('\\n').map(l => l.split('\\t')[0])"
        )

    assert names() == NAMES
    click(browser, "table.dataframe thead th:nth-child(5)")
    assert names() == [BEST, SECOND, THIRD, WORST]
    click(browser, "table.dataframe thead th:nth-child(5)")
    assert names() == [WORST, THIRD, SECOND, BEST]
