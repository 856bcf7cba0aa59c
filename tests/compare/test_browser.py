"""The page of a report in a real browser: it opens without a complaint, and answers to the pointer and to clicks."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking")
FLAGS += ("disable-component-update", "disable-sync")
WORST, SECOND, BEST, THIRD = NAMES = ["<b>|$&", "_low & 50%", "base/line", r"$\nosuch$"]
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser: apt-get install chromium chromium-driver"),
]


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


def point(browser: Any, share: float) -> str:
    """Move the pointer to this share of the figure's width; the text that it shows."""
    browser.execute_script(
        "const over = document.querySelector('.figure .u-over'), box = over.getBoundingClientRect();"
        "over.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: box.left + box.width * arguments[0],"
        "clientY: box.top + box.height / 2}))",
        share,
    )
    return browser.execute_async_script(
        "requestAnimationFrame(() => setTimeout(arguments[0], 50, document.querySelector('.tip').innerText))"
    )


def pixels(browser: Any) -> str:
    return browser.execute_script("return document.querySelector('.figure canvas').toDataURL()")


def click(browser: Any, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def test_a_figure_is_drawn_and_fits_the_window(browser: Any, hostile_report: Path) -> None:
    assert hostile_report.stat().st_size < 2 * 2**20
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    labels = browser.execute_script(
        "return [...document.querySelectorAll('.figure .u-label')].slice(0, 5).map(e => e.textContent)"
    )
    assert labels == ["length", *NAMES]


def test_the_pointer_shows_values_spread_and_seeds_best_first(browser: Any) -> None:
    lines = point(browser, 0.97).splitlines()
    assert lines[0] == "512 tokens (8×)"
    assert [row.split("\t")[0] for row in lines[2:]] == [BEST, SECOND, THIRD, WORST]
    assert f"{BEST}\t17.19 ± 0.012\t–\t17.18, 17.20" in lines
    assert "1.052 [1.052, 1.052]" in next(row for row in lines if row.startswith(SECOND))


def test_a_name_in_the_legend_hides_its_curve_and_shows_it_again(browser: Any) -> None:
    name, before = ".figure .u-legend .u-series:nth-child(2) th", pixels(browser)
    click(browser, name)
    assert (hidden := pixels(browser)) != before
    assert WORST not in point(browser, 0.97)
    click(browser, name)
    assert pixels(browser) != hidden


@pytest.mark.parametrize(("select", "option"), [(".axis", 1), (".axis", 2), (".axis", 3), (".protocol", 1)])
def test_protocol_and_axis_are_chosen(browser: Any, select: str, option: int) -> None:
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
