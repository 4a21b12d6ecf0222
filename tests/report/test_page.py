import dataclasses
import datetime
import importlib.metadata
import re

import numpy as np
import pytest

from pipeline.report import Options, format_page, from_lengths, measure
from tests.report.browser import CHROMIUM, look

COMMAND = "lockstep report 'the corpus' --html page.html"


def html(figures):
    return format_page(figures, command=COMMAND, date=datetime.date(2026, 1, 2))


def test_the_page_needs_no_network_and_no_script_and_has_one_style(figures):
    text = html(figures)
    assert "<script" not in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:,|#)""", text)
    assert not re.search(r"url\((?!#)", text)
    assert "http" not in text
    for each in figures.strategies:
        assert each.name.replace("'", "&#x27;") in text
    for unit in ("length in positions", "work for each token", "positions that hold no token"):
        assert unit in text
    (chart,) = re.findall(r"<svg.*?</svg>", text, re.S)
    assert "currentColor" in chart
    assert not re.search(r"<text[^>]*fill", chart)  # so the page's style decides


def test_the_page_has_its_date_version_and_command_and_is_else_the_same_each_time(figures):
    text = html(figures)
    assert "2026-01-02" in text
    assert f"Lockstep {importlib.metadata.version('lockstep-pipeline')}" in text
    assert "report &#x27;the corpus&#x27; --html page.html" in text
    assert text == html(figures)


def test_bars_are_as_long_as_the_work_that_they_show(figures):
    text = html(figures)
    least = min(each.work["dense"] for each in figures.strategies)
    bars = re.findall(r'<div class="bar">(.*?)</div>', text)
    assert len(bars) == len(figures.strategies)
    for bar, each in zip(bars, figures.strategies, strict=True):
        shares = [float(share) for share in re.findall(r"width:([\d.]+)%", bar)]
        assert sum(shares) == pytest.approx(40 * each.work["dense"] / least, abs=0.03)
        assert sum(shares[:2]) / shares[0] == pytest.approx(1 / (1 - each.padding), rel=0.01)


def test_lengths_that_are_all_the_same_make_a_page():
    same = from_lengths("same", np.full(512, 64))
    text = html(measure(same, Options({"tokens_per_batch": 512, "length_multiple": 64})))
    assert "One bucket is enough" in text


def test_the_page_shows_names_as_they_are(figures):
    text = html(dataclasses.replace(figures, name="<b>&</b>"))
    assert "<h1>&lt;b&gt;&amp;&lt;/b&gt;</h1>" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")
class TestInABrowser:
    def test_a_broken_page_would_be_noticed(self, tmp_path):
        wide = '<svg viewBox="0 0 400 50"><text x="390" y="20">beyond the edge</text></svg>'
        page = f"<html><head></head><body><script>fail()</script>{wide}</body></html>"
        seen = look(page, tmp_path, width=600)
        assert any("fail" in line for line in seen["console"])
        assert any("beyond the edge" in problem for problem in seen["problems"])

    @pytest.mark.parametrize("lengths", [[1, 1], [3, 200], [[2, 900], [0, 1]]])
    def test_lengths_far_from_those_of_the_buckets_stay_on_the_page(self, lengths, tmp_path):
        dataset = from_lengths("few", np.array(lengths))
        page = html(measure(dataset, Options({"tokens_per_batch": 4096})))
        assert look(page, tmp_path, width=390)["problems"] == []

    @pytest.mark.parametrize("dark", [False, True])
    @pytest.mark.parametrize("width", [390, 1280])
    def test_nothing_is_cut_and_the_console_is_empty(self, figures, tmp_path, width, dark):
        seen = look(html(figures), tmp_path, width=width, dark=dark)
        assert seen["console"] == []
        assert seen["problems"] == []
        assert (seen["width"], seen["dark"]) == (width, dark)
        assert seen["drawings"] == 1
        assert seen["contrast"] >= 4.5  # of the faintest text, as WCAG asks
        assert seen["height"] < (4500 if width == 390 else 3000)
