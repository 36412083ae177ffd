"""The report in a real browser: Debian's Chromium, driven by Playwright. Skipped where one of them is missing."""

import os
import shutil

import pytest
from saved import clients_of, write_run

from fedobp.report.page import write_report
from fedobp.saved_runs import find_runs

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DATASET = "<script>alert(1)</script>" + "x" * 60
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=0)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of two settings, with all its figures, and names that would do harm."""
    folder = tmp_path_factory.mktemp("study")
    for alpha in (0.1, 0.5):
        for seed in (1, 2):
            for at, method in enumerate(("fedobp", "fedavg", "local")):
                rows = clients_of(30, lambda i, at=at: float((i * (at + 7)) % 101))
                write_run(
                    folder, method, seed, 80 - 9 * at, clients=rows, alpha=alpha, dataset=DATASET,
                    name=f"{method}{alpha}{seed}",
                )  # fmt: skip
    return write_report(folder / "report.html", find_runs([folder]))


@pytest.fixture
def opened(browser, report):
    """Open the report with some settings; nothing is requested but the file, and nothing is said on the console."""
    contexts, problems = [], []

    def call(width=1200, **more):
        context = browser.new_context(viewport={"width": width, "height": 800}, reduced_motion="reduce", **more)
        contexts.append(context)
        context.set_default_timeout(0)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: request.url == report.as_uri() or problems.append(request.url))
        page.goto(report.as_uri())
        return page

    yield call
    for context in contexts:
        context.close()
    assert problems == []


def colour(page, selector, name):
    return page.eval_on_selector(selector, f"one => getComputedStyle(one).{name}")


def centre(page, locator):
    locator.scroll_into_view_if_needed()
    box = locator.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_the_page_opens_from_disk_and_its_figures_are_there(opened):
    page = opened()
    assert page.title() == f"3 methods on {DATASET}"
    drawn = page.locator("figure svg[role=img]:visible")
    # In each setting: accuracy, one dot plot, three stacks, three heat maps, bytes and time.
    assert drawn.count() == 2 * (1 + 1 + 3 + 3 + 2)
    for box in (drawn.nth(at).bounding_box() for at in range(drawn.count())):
        assert box["width"] > 250
        assert box["height"] > 70


def test_a_pointer_shows_what_a_client_is(opened):
    page = opened()
    plot = page.locator("figure[data-kind=clients] svg").first
    page.mouse.move(*centre(page, plot))
    tip = page.locator("#tip")
    assert tip.is_visible()
    first, size, entropy = tip.inner_text().splitlines()
    client = int(first.split(":")[0].removeprefix("client "))
    assert first.endswith(f"fedobp {client * 7 % 101}.0, fedavg {client * 8 % 101}.0, local {client * 9 % 101}.0")
    assert size == f"{10 + client} training and 5 test samples"
    assert entropy == f"label entropy {client / 30:.2f} bits"
    page.mouse.move(2, 2)
    assert tip.is_hidden()


def test_a_pointer_shows_a_point_of_a_curve_and_a_cell_of_a_heat_map(opened):
    page = opened()
    line = page.locator("figure[data-kind=points] svg:visible [data-s][data-m='1'] > path").first
    line.scroll_into_view_if_needed()
    box = line.bounding_box()
    page.mouse.move(box["x"] + box["width"], box["y"])  # the last point: it rises from left to right
    assert page.locator("#tip").inner_text() == "fedobp\nround 4: 80.00 ± 0.00"
    cells = page.locator("figure[data-kind=cells] svg").first.locator("[data-cells]")
    cells.scroll_into_view_if_needed()
    box = cells.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] - 2)
    assert page.locator("#tip").inner_text() == "client 29, classifier: 32 personal"


def test_a_finger_shows_a_client_until_it_touches_something_else(opened):
    page = opened(390, has_touch=True)
    page.touchscreen.tap(*centre(page, page.locator("figure[data-kind=clients] svg").first))
    assert page.locator("#tip").inner_text().startswith("client ")
    page.touchscreen.tap(*centre(page, page.locator("h3", has_text="Accuracy per client").first))
    assert page.locator("#tip").is_hidden()


def test_arrow_keys_go_from_point_to_point(opened):
    page = opened()
    page.locator("figure[data-kind=points] .plot").first.focus()
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
        said.append(page.locator("#tip").inner_text().split("\n"))
    assert said == [
        ["fedavg", "round 2: 35.50 ± 0.00"],
        ["fedavg", "round 4: 71.00 ± 0.00"],
        ["fedavg", "round 4: 71.00 ± 0.00"],  # the last one
        ["fedobp", "round 4: 80.00 ± 0.00"],
        ["fedobp", "round 2: 40.00 ± 0.00"],
    ]
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


@pytest.mark.parametrize("way", ["pointer", "keyboard"])
def test_the_legend_switches_a_method_in_all_figures(opened, way):
    page = opened()
    button = page.locator(".legend button", has_text="fedavg").first
    curves = page.locator("figure[data-kind=points] svg:visible [data-m='0']:visible")
    shown = curves.count()
    assert shown == 2 * 2  # in two settings, a curve and its band
    switch = button.click if way == "pointer" else lambda: (button.focus(), page.keyboard.press("Enter"))
    switch()
    assert curves.count() == 0
    assert page.locator("figure[data-kind=clients] [data-m='0']:visible").count() == 0
    pressed = page.locator(".legend button[data-toggle='0']").evaluate_all("all => all.map(one => one.ariaPressed)")
    assert pressed == ["false", "false"]
    assert page.locator("figure[data-kind=points] svg:visible [data-m='1']:visible").count() == shown
    switch()
    assert curves.count() == shown


def test_a_legend_entry_highlights_its_method(opened):
    page = opened()
    page.locator(".legend button", has_text="fedobp").first.hover()
    opacity = {at: colour(page, f"figure[data-kind=points] [data-s][data-m='{at}']", "opacity") for at in (0, 1)}
    assert opacity == {0: "0.13", 1: "1"}


def test_a_table_is_sorted_by_a_column(opened):
    page = opened()
    table = page.locator("table").nth(1)
    head = table.locator("thead button", has_text="Pooled")
    head.click()
    assert table.locator("tbody th").all_inner_texts() == ["fedobp", "fedavg", "local"]
    head.click()
    assert table.locator("tbody th").all_inner_texts() == ["local", "fedavg", "fedobp"]
    assert head.locator("..").get_attribute("aria-sort") == "ascending"


def test_a_phone_has_no_sideways_scroll_and_legible_text(opened):
    page = opened(390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    wide = page.locator(".scroll").nth(1)
    assert wide.evaluate("one => one.scrollWidth > one.clientWidth")  # the table scrolls in its own box
    heights = page.locator("figure svg[role=img]:visible text").evaluate_all(
        """all => all.map(one => {
            const { a, b } = one.getScreenCTM();
            return parseFloat(getComputedStyle(one).fontSize) * Math.hypot(a, b);
        })"""
    )
    assert min(heights) > 9


def test_light_and_dark_differ_and_both_have_contrast(opened):
    seen = {}
    for scheme in ("light", "dark"):
        page = opened(color_scheme=scheme)
        seen[scheme] = [
            colour(page, "body", "backgroundColor"),
            colour(page, "body", "color"),
            colour(page, "figure[data-kind=points] svg text", "fill"),
            colour(page, "figure[data-kind=points] [data-s] > path", "stroke"),
        ]
    assert all(light != dark for light, dark in zip(*seen.values(), strict=True))
    for paper, ink, label, _ in seen.values():
        assert contrast(paper, ink) > 7
        assert contrast(paper, label) > 4.5


def contrast(one, other):
    """Return the ratio of two colours' relative luminances, as WCAG defines it."""

    def luminance(text):
        parts = [int(part) / 255 for part in text[text.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_it_prints_on_paper_in_light_colours_with_all_its_runs(opened):
    page = opened(color_scheme="dark")
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert page.locator("details").get_attribute("open") is not None
    page.emulate_media(media="print", color_scheme="dark")
    assert colour(page, "body", "backgroundColor") == "rgb(255, 255, 255)"
    assert colour(page, ".scroll", "overflow") == "visible"
    assert colour(page, ".legend", "position") == "static"
