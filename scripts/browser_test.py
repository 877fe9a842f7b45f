"""The report in a browser, by pointer and keyboard.

Needs Debian's package chromium and ``pip install playwright``. Not run by default: ``bash
scripts/test.sh -m browser scripts/browser_test.py``.
"""

import json
import re
import shutil

import pytest

from common.files import ROOT
from common.metrics.metrics_file import read_metrics
from common.tools import report

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

RUN = ROOT / "cifar10_benchmark"  # a real run's metrics.jsonl


def test_the_page_shows_two_runs(tmp_path):
    from playwright.sync_api import sync_playwright  # not in requirements.txt: 165 MB

    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        shutil.copy(RUN / "metrics.jsonl", folder)
        (folder / "config.json").write_text(json.dumps({"config": {"KEY": "x" * 300}}))
    report.main([*map(str, folders), "--output", str(tmp_path / "report.html")])
    chromium = shutil.which("chromium") or pytest.fail(
        "chromium is missing: apt-get install chromium"
    )
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium) as browser,
    ):
        page = browser.new_page(viewport={"width": 375, "height": 900}, color_scheme="dark")
        problems, requests = [], []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        assert (problems, set(requests[1:]) <= {"data:,"}) == ([], True)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375

        lines = read_metrics(RUN)
        shown = page.evaluate(
            "[...document.querySelectorAll('figure')].map(figure => figure.dataset.figure)"
        )
        assert shown == [name for name in report.CHARTS if any(name in line for line in lines)]
        curve = page.locator("[data-figure=top1] path").first.get_attribute("d")
        assert len(re.findall("[ML]", curve)) == len(
            [line for line in lines if line["kind"] == "eval"]
        )
        heights = [float(y) for y in re.findall(r"[ML]\S+ ([\d.]+)", curve)]
        assert heights[0] > heights[-1]  # from the top
        assert (
            page.locator("[data-figure=loss] path").first.get_attribute("stroke-dasharray") is None
        )

        page.locator("[data-figure=top1]").focus()
        first, *_, last = [
            (line["step"], 100 * line["top1"]) for line in lines if line["kind"] == "eval"
        ]
        for key, (step, top1) in {"Home": first, "End": last, "ArrowRight": last}.items():
            page.keyboard.press(key)
            words = page.locator(".tip").inner_text().split()
            assert words[:2] == ["step", f"{step:,}"]
            assert words.count(f"{top1:g}") == 2
        page.locator("[data-figure=loss] svg").hover()
        assert (
            page.locator("[data-figure=loss] .tip b").count() == 4
        )  # training and evaluation of both
