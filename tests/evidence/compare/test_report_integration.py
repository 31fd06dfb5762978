"""The report in a browser: it draws everything, asks the network for nothing, fits a phone, follows dark mode."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from synthetic import SPECS, comparison, hostile

from manyhands.evidence.compare.report import html, load, save

pytestmark = pytest.mark.slow

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
CHARTS = 10
DRAWN = "[...document.querySelectorAll('.plot')].filter(p => p.querySelector('.main-svg .trace')).length"
WIDEST = "Math.max(...[...document.querySelectorAll('.plot .main-svg')].map(svg => svg.clientWidth))"
NARROW, WIDE = f"{WIDEST} < 390", f"{WIDEST} > 900"


@dataclass
class Opened:
    """A page, and what it complained of or asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def number(self, expression: str) -> float:
        return float(self.page.evaluate(expression))

    def until(self, condition: str) -> None:
        """Wait for it, frame by frame (Playwright's own wait needs eval, which the page forbids)."""
        self.page.evaluate(
            f"""async () => {{
                  const end = performance.now() + 60000;
                  while (!({condition})) {{
                    if (performance.now() > end) throw new Error("it never came true");
                    await new Promise(requestAnimationFrame);
                  }}
                }}"""
        )

    def colour(self, selector: str, what: str) -> str:
        return str(self.page.eval_on_selector(selector, f"one => getComputedStyle(one).{what}"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright, of the extra dev, is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium on the PATH: the report is not tested in a browser")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def rich(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Everything that a comparison may have, saved and opened; each test leaves it on a desktop, in light mode."""
    made = comparison(SPECS, (2, 4), fails=("allreduce on 2",))
    path = save(made, tmp_path_factory.mktemp("report"))
    assert load(path.parent) == made
    opened = opened_in(browser, path, DESKTOP)
    yield opened
    opened.page.context.close()


def opened_in(browser: Any, path: Path, viewport: dict[str, int]) -> Opened:
    """The file in a page of its own, which may load it and nothing else."""
    opened = Opened(page=browser.new_context(viewport=viewport, color_scheme="light").new_page())
    page = opened.page

    def route(route: Any) -> None:
        url = route.request.url
        if url == path.as_uri() or url.startswith("data:"):
            route.continue_()
            return
        opened.asked.append(url)
        route.abort()

    page.route("**/*", route)
    page.on("console", lambda message: opened.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: opened.complaints.append(f"error: {error}"))
    page.goto(path.as_uri())
    opened.until(f"{DRAWN} == document.querySelectorAll('.plot').length")
    return opened


def drawn(opened: Opened) -> int:
    """Charts of which the browser holds an SVG with at least one line or bar."""
    return int(opened.number(DRAWN))


def sideways(opened: Opened) -> float:
    """Pixels that the page is wider than its window."""
    return opened.number("document.documentElement.scrollWidth - innerWidth")


def test_every_chart_is_drawn_without_a_complaint_or_a_request(rich: Opened) -> None:
    assert drawn(rich) == rich.number("document.querySelectorAll('.plot').length") == CHARTS
    assert (rich.complaints, rich.asked, sideways(rich)) == ([], [], 0)
    outside = rich.page.evaluate(
        """[...document.querySelectorAll('.plot')].flatMap(plot => {
             const box = plot.getBoundingClientRect();
             return [...plot.querySelectorAll('svg text')].filter(text => {
               const own = text.getBoundingClientRect();
               return own.width && (own.left < box.left - 2 || own.right > box.right + 2
                                    || own.top < box.top - 2 || own.bottom > box.bottom + 2);
             }).map(text => `${plot.id}: ${text.textContent}`);
           })"""
    )
    assert outside == []  # no text of a chart is cut off


def test_dark_mode_changes_page_texts_lines_and_back_and_printing_is_light(rich: Opened) -> None:
    looks = {
        "page": ("body", "backgroundColor"),
        "text": (".plot svg .xtick text", "fill"),
        "line": ("#speed_up .scatterlayer .trace:last-of-type .js-line", "stroke"),
        "swatch": (".swatch", "stroke"),
    }
    fill = "getComputedStyle(document.querySelector('.plot svg .xtick text')).fill"
    light = {name: rich.colour(*where) for name, where in looks.items()}
    rich.page.emulate_media(color_scheme="dark")
    rich.until(f"{fill} != '{light['text']}'")
    dark = {name: rich.colour(*where) for name, where in looks.items()}
    assert {name for name in looks if dark[name] == light[name]} == set()
    rich.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert rich.page.evaluate(fill) == light["text"]
    rich.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert rich.page.evaluate(fill) == dark["text"]
    rich.page.emulate_media(color_scheme="light")
    rich.until(f"{fill} == '{light['text']}'")
    assert {name: rich.colour(*where) for name, where in looks.items()} == light


def test_a_name_in_a_legend_hides_its_lines_in_all_charts(rich: Opened) -> None:
    def lines(plot: str) -> int:
        return rich.page.locator(f"#{plot} .scatterlayer .js-line").count()

    name = "local-sgd:period=8 on 2"
    before = {plot: lines(plot) for plot in ("metric_over_time", "metric_over_rows", "distance_over_time")}
    button = rich.page.get_by_role("button", name=name, exact=True)
    button.first.focus()
    rich.page.keyboard.press("Enter")
    assert {one.get_attribute("aria-pressed") for one in button.all()} == {"false"}
    hidden = {plot: lines(plot) for plot in before}
    assert all(hidden[plot] < before[plot] for plot in before)
    button.last.click()
    assert {plot: lines(plot) for plot in before} == before


def test_on_a_phone_the_page_stays_in_its_width_and_the_table_scrolls_in_its_box(rich: Opened) -> None:
    rich.page.set_viewport_size(PHONE)
    rich.until(NARROW)
    assert rich.number("document.documentElement.scrollWidth") <= 390
    assert rich.number("document.querySelector('.box').scrollWidth") > 390
    rich.page.evaluate("document.querySelector('.box').scrollLeft = 300")
    assert 0 <= rich.number("document.querySelector('th[scope=row]').getBoundingClientRect().left") < 20  # names stay
    assert (drawn(rich), rich.complaints) == (CHARTS, [])
    rich.page.set_viewport_size(DESKTOP)
    rich.until(WIDE)


def test_hostile_names_are_only_text_and_many_variants_of_many_workers_fit_a_phone(
    browser: Any, tmp_path: Path
) -> None:
    specs = tuple(f"downpour:push_every={i}" for i in range(1, 13))
    for made in (hostile(), comparison(specs, (64,), repeats=1, simulated={"network": "ideal"})):
        (tmp_path / "report.html").write_text(html(made))
        opened = opened_in(browser, tmp_path / "report.html", PHONE)
        assert opened.page.evaluate("window.broken") is None
        assert opened.page.locator("a, img, iframe, object").count() == 0
        assert drawn(opened) == opened.number("document.querySelectorAll('.plot').length") > 5
        assert (opened.complaints, opened.asked, sideways(opened)) == ([], [], 0)
        opened.page.context.close()
