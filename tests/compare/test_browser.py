"""The page of a report in a real browser: it opens without a complaint, and answers to the pointer and to clicks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kerple.compare.collect import locate, read
from tests.compare.browser import Browser, installed

from kerple.compare import page
from tests.compare.runs_on_disk import CURVES, write_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed(), reason="no Chromium: apt-get install chromium chromium-driver"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    curves = CURVES | {"<b>|$&": (19.0, 40.0, 300.0, 2000.0)}
    for strategy, curve in curves.items():
        for seed in (1235, 1236):
            write_run(root / strategy / f"seed-{seed}", strategy, seed, curve)
    return page.write(read(locate([root])), root / "report", name="four", baseline="KerpleLog", missing=["T5 seed 1"])


@pytest.fixture(params=[390, 1200], ids=["phone", "desktop"])
def browser(request: pytest.FixtureRequest, report: Path) -> Iterator[Browser]:
    with Browser(request.param) as browser:
        browser.open(report)
        yield browser
        assert browser.complaints() == []


def test_the_page_is_small_and_asks_for_nothing(report: Path) -> None:
    assert report.stat().st_size < 2 * 2**20


def test_a_figure_is_drawn_and_fits_the_window(browser: Browser) -> None:
    assert browser.run("return document.querySelectorAll('.figure canvas').length") >= 1
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    labels = browser.run(
        "return [...document.querySelectorAll('.figure .u-label')].slice(0, 5).map(e => e.textContent)"
    )
    assert labels == ["length", "<b>|$&", "ALiBi", "KerpleLog", "RoPE"]


def test_the_pointer_shows_values_spread_and_seeds_best_first(browser: Browser) -> None:
    browser.point(".figure .u-over", 0.97)
    text = browser.run("return document.querySelector('.tip').innerText")
    assert text.splitlines()[0] == "512 tokens (8×)"
    assert [row.split("\t")[0] for row in text.splitlines()[2:]] == ["KerpleLog", "ALiBi", "RoPE", "<b>|$&"]
    assert "KerpleLog\t17.19 ± 0.012\t–\t17.18, 17.20" in text
    assert "1.052 [1.052, 1.052]" in next(row for row in text.splitlines() if row.startswith("ALiBi"))


def pixels(browser: Browser) -> str:
    return browser.run("return document.querySelector('.figure canvas').toDataURL()")


def test_a_name_in_the_legend_hides_its_curve_and_shows_it_again(browser: Browser) -> None:
    before = pixels(browser)
    browser.click(".figure .u-legend .u-series:nth-child(2) th")
    hidden = pixels(browser)
    assert hidden != before
    browser.point(".figure .u-over", 0.97)
    assert "<b>|$&" not in browser.run("return document.querySelector('.tip').innerText")
    browser.click(".figure .u-legend .u-series:nth-child(2) th")
    browser.run("document.querySelector('.figure .u-over').dispatchEvent(new MouseEvent('mouseleave'))")
    assert pixels(browser) != hidden


@pytest.mark.parametrize(("select", "option"), [(".axis", n) for n in (1, 2, 3)] + [(".protocol", 1)])
def test_protocol_and_axis_are_chosen(browser: Browser, select: str, option: int) -> None:
    before = pixels(browser)
    browser.run(
        f"const s = document.querySelector('.figure {select}'); s.selectedIndex = {option};"
        "s.dispatchEvent(new Event('change'))"
    )
    assert pixels(browser) != before


def test_a_click_sorts_a_table_by_numbers_and_back(browser: Browser) -> None:
    def names() -> list[str]:
        return browser.run("return [...document.querySelectorAll('table.dataframe tbody')][0].innerText.split('\\n')"
                           ".map(line => line.split('\\t')[0])")  # fmt: skip

    assert names() == ["<b>|$&", "ALiBi", "KerpleLog", "RoPE"]
    browser.click("table.dataframe thead th:nth-child(5)")
    assert names() == ["KerpleLog", "ALiBi", "RoPE", "<b>|$&"]
    browser.click("table.dataframe thead th:nth-child(5)")
    assert names() == ["<b>|$&", "RoPE", "ALiBi", "KerpleLog"]
