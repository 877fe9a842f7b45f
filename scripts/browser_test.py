"""Reports in a browser, and what TensorBoard reads.

Needs Debian's package chromium and ``pip install playwright``. Not run by default: ``bash scripts/test.sh -m browser
scripts/browser_test.py``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.metrics.curves import read_metrics
from common.tools import report
from imagenet_dali.testing import prepare_data, run, write_config

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

FIGURES = ["loss", "top1", "top5", "lr", "grad_norm", "skipped", "samples_per_s", "mfu", "data_wait", "peak_memory_gb"]
EVIL = "<img src=x onerror=alert(1)>&amp;</script>"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a real run of 12 steps."""
    folder = tmp_path_factory.mktemp("trained")
    data = str(prepare_data(folder))
    run(f"python train_dali.py --config={write_config(folder)} --output={folder}/run", DATA=data)
    return folder / "run"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright  # not in requirements.txt: 165 MB

    chromium = shutil.which("chromium") or pytest.fail("chromium is missing: apt-get install chromium")
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=chromium) as browser:
        yield browser


def open_page(browser: Browser, address: str, *, width: int = 1280, dark: bool = False) -> Page:
    """Open an address in a new window; it must raise no error and request nothing from elsewhere."""
    page = browser.new_page(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", has_touch=width < 600
    )
    problems, requests = [], []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    assert problems == []
    assert all(request.startswith((address, "data:", "blob:")) for request in requests)
    return page


def write_run(folder: Path, losses: list[float | None]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"config": {"LOSSES": losses, "A.long_key_of": "x" * 300}}))
    records = [{"kind": "train", "step": 10 * n, "epoch": n, "loss": loss} for n, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def open_report(browser: Browser, *folders: Path, **window) -> Page:
    output = folders[0].parent / "report.html"
    report.main([*map(str, folders), "--output", str(output)])
    return open_page(browser, output.as_uri(), **window)


def points(page: Page, figure: str) -> list[list[tuple[float, float]]]:
    """Return the points of each curve of a chart, in the units of its tick labels."""
    drawn = page.evaluate(f"""(() => {{
        const svg = document.querySelector("[data-figure={figure}] svg");
        const texts = [...svg.querySelectorAll("text")].map(text =>
            [text.getAttribute("text-anchor"), +text.getAttribute("x"), +text.getAttribute("y"), text.textContent]);
        return {{texts, paths: [...svg.querySelectorAll("path")].map(path => path.getAttribute("d"))}};
    }})()""")
    ticks = [(*place, float(text.replace(",", ""))) for *place, text in drawn["texts"] if text != "optimizer step"]
    along = [(x, value) for anchor, x, _, value in ticks if anchor == "middle"]
    up = [(y - 4, value) for anchor, _, y, value in ticks if anchor == "end"]  # text sits 4 pixels below its line

    def convert(pixel: float, axis: list[tuple[float, float]]) -> float:
        (start, low), (end, high) = axis[0], axis[-1]
        return low + (pixel - start) / (end - start) * (high - low)

    pairs = [re.findall(r"([\d.]+) ([\d.]+)", path) for path in drawn["paths"]]
    return [[(convert(float(x), along), convert(float(y), up)) for x, y in path] for path in pairs]


def tooltip(page: Page) -> dict[str, str]:
    rows = page.evaluate("""[...document.querySelectorAll(".tip div")].map(row =>
        [row.querySelector("span")?.textContent ?? "", row.querySelector("b")?.textContent ?? row.textContent])""")
    return dict(rows)


def middle_of_chart(page: Page) -> list[float]:
    """Scroll to the first chart; return the window coordinates of the middle of its x axis, halfway up."""
    return page.evaluate("""(() => {
        const svg = document.querySelector("svg");
        svg.scrollIntoView({block: "center"});
        const box = svg.getBoundingClientRect();
        const ticks = [...svg.querySelectorAll("text[text-anchor=middle]")].map(text => text.getBoundingClientRect());
        const end = svg.querySelector("path").getBoundingClientRect().right;
        return [(ticks[0].x + ticks[0].width / 2 + end) / 2, box.y + box.height / 2];
    })()""")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 1280])
def test_a_real_run(width, dark, browser, trained):
    page = open_report(browser, trained, width=width, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.querySelectorAll('figure')].map(figure => figure.dataset.figure)") == FIGURES
    records = read_metrics(trained)
    for name in FIGURES:
        scale = 100 if name in ("top1", "top5", "mfu", "data_wait") else 1
        kinds = [kind for kind in ("train", "eval") if any(name in r for r in records if r["kind"] == kind)]
        curves = points(page, name)
        assert len(curves) == len(kinds)
        for kind, curve in zip(kinds, curves, strict=True):
            recorded = [(r["step"], scale * r[name]) for r in records if r["kind"] == kind]
            spread = max(abs(value) for _, value in recorded)
            assert [x for x, _ in curve] == pytest.approx([x for x, _ in recorded], abs=0.1)
            assert [y for _, y in curve] == pytest.approx([y for _, y in recorded], abs=0.01 * spread)
    top1 = next(record["top1"] for record in reversed(records) if record["kind"] == "eval")
    assert page.evaluate("document.querySelector('tbody td').textContent") == f"{top1:.2%}"


def test_a_tap_shows_the_values(browser, tmp_path):
    page = open_report(browser, write_run(tmp_path / "run", [3.0, 2.0, 1.5, 1.25]), width=375)
    page.touchscreen.tap(*middle_of_chart(page))
    assert tooltip(page) == {"": "step 20", "training": "2"}


def test_three_runs_have_three_colours_and_a_legend(browser, tmp_path):
    folders = [write_run(tmp_path / name, [3.0, loss, None, 1.0]) for name, loss in zip("abc", (1, 2, 3), strict=True)]
    page = open_report(browser, *folders, width=375)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert page.evaluate("document.getElementById('legend').innerText").split() == ["a", "b", "c"]
    colours = page.evaluate("[...document.querySelectorAll('path')].map(path => getComputedStyle(path).stroke)")
    keys = "[...document.querySelectorAll('#legend .key')].map(key => getComputedStyle(key).backgroundColor)"
    assert colours == page.evaluate(keys)
    assert len(set(colours)) == 3
    lines = page.evaluate("[...document.querySelectorAll('path')].map(path => path.getAttribute('d'))")
    assert [line.count("M") for line in lines] == [2, 2, 2]  # the pen is lifted over the gap
    page.mouse.move(*middle_of_chart(page))
    assert tooltip(page) == {"": "step 20", "a": "1", "b": "2", "c": "3"}
    page.mouse.move(1, 1)
    assert tooltip(page) == {}


def test_names_are_text(browser, tmp_path):
    run = write_run(tmp_path / "run", [1.0, 2.0])
    (run / "metrics.jsonl").write_text(json.dumps({"kind": EVIL, "step": 1, "epoch": 1, EVIL: 0.5}) + "\n")
    html = report.render([report.load_run(run, EVIL)] * 2)
    (tmp_path / "evil.html").write_text(html)
    page = open_page(browser, (tmp_path / "evil.html").as_uri())
    assert page.evaluate("document.images.length") == 0
    assert page.evaluate("document.querySelector('h3').textContent") == EVIL
    assert page.evaluate("document.querySelector('#legend span').textContent") == EVIL
    page.mouse.move(*middle_of_chart(page))
    assert EVIL in tooltip(page)


@pytest.mark.parametrize("values", [[], [None], [0.0], [1.0, 1.0], [1e-7, 2e-7], [1e9, -3e9]])
def test_few_or_extreme_values(values, browser, tmp_path):
    page = open_report(browser, write_run(tmp_path / "run", values))
    figures = page.evaluate("document.querySelectorAll('figure').length")
    assert figures == (len(values) > 0 and None not in values)
    assert "NaN" not in page.evaluate("document.getElementById('charts').innerHTML")


def test_tensorboard_reads_the_run(trained):
    events = EventAccumulator(str(trained / "tensorboard")).Reload()
    shown = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert shown == {
        (f"{record['kind']}/{name}", record["step"]): pytest.approx(record[name])
        for record in read_metrics(trained)
        for name in record.keys() - {"kind", "step", "epoch", "time"}
    }
