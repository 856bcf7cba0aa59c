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
        driver.set_script_timeout(30)
        yield driver


@pytest.fixture
def browser(driver: Any, hostile_report: Path) -> Iterator[Any]:
    driver.get(hostile_report.as_uri())
    drawn = "document.querySelectorAll('details[open] .plot .legendtext').length >= 4"
    driver.execute_async_script(f"const wait = () => {drawn} ? arguments[0]() : setTimeout(wait, 10); wait()")
    yield driver
    assert driver.get_log("browser") == []


def texts(browser: Any, selector: str) -> list[str]:
    """The texts of the elements in the first chart."""
    found = f"[...document.querySelector('.plot').querySelectorAll('{selector}')]"
    return browser.execute_script(f"return {found}.map(element => element.textContent)")


def trace(browser: Any, name: int, attribute: str) -> Any:
    """An attribute of the curve of a strategy in the first chart. The band of a strategy is the trace before it."""
    return browser.execute_script(f"return document.querySelector('.plot')._fullData[{2 * name + 1}].{attribute}")


def click(browser: Any, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


@pytest.mark.slow
def test_charts_are_drawn_in_a_small_page_that_fits_the_window_without_sending_data(
    browser: Any, hostile_report: Path
) -> None:
    assert hostile_report.stat().st_size < 3 * 2**20
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert sorted(texts(browser, ".legendtext")) == sorted(NAMES)
    assert browser.execute_script("return [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")[
        :2
    ] == ["Download plot as a PNG", "Zoom"]
    assert not browser.execute_script("return document.querySelector('[data-attr=sendChartToCloud]')")
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_the_pointer_shows_values_spread_and_seeds(browser: Any) -> None:
    point = f"[{{curveNumber: {2 * NAMES.index(BEST) + 1}, pointNumber: 3}}]"
    browser.execute_script(f"Plotly.Fx.hover(document.querySelector('.plot'), {point})")
    assert "".join(texts(browser, ".hovertext text")) == f"{BEST}at 512: 17.19 ± 0.01seeds: 17.18, 17.20"


def test_a_click_on_a_name_hides_its_curve_also_on_another_axis(browser: Any) -> None:
    press = "for (const kind of ['mousedown', 'mouseup']) document.querySelector('.plot .legendtoggle').dispatchEvent("
    browser.execute_script(press + "new MouseEvent(kind, {bubbles: true}))")
    hidden = NAMES.index(texts(browser, ".legendtext")[0])
    waiting = f"document.querySelector('.plot')._fullData[{2 * hidden + 1}].visible === 'legendonly'"
    browser.execute_async_script(f"const wait = () => {waiting} ? arguments[0]() : setTimeout(wait, 10); wait()")
    select(browser, 1, 0)
    assert [trace(browser, name, "visible") for name in range(4)].count("legendonly") == 1
    assert trace(browser, hidden, "visible") == "legendonly"


def select(browser: Any, control: int, option: int) -> None:
    """Select an option of a control of the first chart: its protocol, vertical axis or horizontal axis."""
    browser.execute_script(
        f"const select = document.querySelector('.chart').querySelectorAll('select')[{control}];"
        f"select.selectedIndex = {option}; select.dispatchEvent(new Event('change'))"
    )


def test_another_protocol_or_axis_is_drawn(browser: Any) -> None:
    axes = "const {xaxis, yaxis} = document.querySelector('.plot')._fullLayout; return [xaxis.type, yaxis.type]"
    assert browser.execute_script(axes) == ["log", "log"]
    y = trace(browser, 0, "y")
    assert y == pytest.approx([19 * 0.9995, 40 * 0.9995, 300 * 0.9995, 2000 * 0.9995])  # seeds at 0.999 and 1
    select(browser, 0, 1)
    assert trace(browser, 0, "y") == pytest.approx([value * 1.01005 for value in y], rel=1e-5)  # 0.01 nats more
    select(browser, 1, 0)
    select(browser, 2, 0)
    assert browser.execute_script(axes) == ["linear", "linear"]
    select(browser, 1, 2)
    assert trace(browser, 0, "y") == pytest.approx(
        [0, 100 * (40 / 19 - 1), 100 * (300 / 19 - 1), 100 * (2000 / 19 - 1)]
    )


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
