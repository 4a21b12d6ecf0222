import datetime
import importlib.metadata
import re

import numpy as np
import pytest

from pipeline.report import Options, format_page, from_corpus, from_lengths, measure
from tests.browser import CHROMIUM, look

# A narrow model, for which several buckets are worth it.
OPTIONS = {
    "tokens_per_batch": 512,
    "max_length": 64,
    "length_multiple": 8,
    "width": 4,
    "row_multiple": 4,
}
COMMAND = "lockstep report 'the corpus' --html page.html"


@pytest.fixture(scope="module")
def figures(corpus):
    return measure(from_corpus(corpus, "the corpus"), Options(OPTIONS))


def html(figures):
    return format_page(figures, command=COMMAND, date=datetime.date(2026, 1, 2))


def test_the_page_needs_no_network_and_no_script(figures):
    text = html(figures)
    assert "<script" not in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:,|#)""", text)
    assert not re.search(r"url\((?!#)", text)
    assert "http" not in text
    for each in figures["strategies"]:
        assert each["name"] in text
    for unit in ("length, positions", "work per real token", "step of the epoch", "rows, %"):
        assert unit in text


def test_the_page_has_its_date_version_and_command_and_is_else_the_same_each_time(figures):
    text = html(figures)
    assert "2026-01-02" in text
    assert f"Lockstep {importlib.metadata.version('lockstep-pipeline')}" in text
    assert "report &#x27;the corpus&#x27; --html page.html" in text
    assert text == html(figures)


def test_text_of_charts_has_the_colour_of_the_page(figures):
    charts = re.findall(r"<svg.*?</svg>", html(figures), re.S)
    assert len(charts) >= 5
    for chart in charts:
        assert "currentColor" in chart
        assert "#000000" not in chart
        assert not re.search(r"<text[^>]*fill", chart)  # so the page's style decides
        ids = re.findall(r'\bid="([^"]+)"', chart)
        assert len(ids) == len(set(ids))


def test_a_chart_that_would_say_nothing_is_left_out():
    same = from_lengths("same", np.full(512, 64))
    text = html(measure(same, Options({"tokens_per_batch": 512, "length_multiple": 64})))
    titles = re.findall(r"<h3>(.*?)</h3>", text)
    assert titles == ["Work per real token"]  # one bucket, one length, one segment in a row


def test_the_page_shows_names_as_they_are(figures):
    text = html({**figures, "name": "<b>&</b>"})
    assert "<h1>&lt;b&gt;&amp;&lt;/b&gt;</h1>" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")
class TestInABrowser:
    def test_a_broken_page_would_be_noticed(self, tmp_path):
        wide = '<svg viewBox="0 0 400 50"><text x="390" y="20">beyond the edge</text></svg>'
        file = tmp_path / "broken.html"
        file.write_text(f"<html><head></head><body><script>fail()</script>{wide}</body></html>")
        seen = look(file, tmp_path, width=600)
        assert any("fail" in line for line in seen["console"])
        assert any("beyond the edge" in problem for problem in seen["problems"])

    @pytest.mark.parametrize("dark", [False, True])
    @pytest.mark.parametrize("width", [390, 1280])
    def test_nothing_is_cut_and_the_console_is_empty(self, figures, tmp_path, width, dark):
        file = tmp_path / "report.html"
        file.write_text(html(figures))
        seen = look(file, tmp_path, width=width, dark=dark)
        assert seen["console"] == []
        assert seen["problems"] == []
        assert (seen["width"], seen["dark"]) == (width, dark)
        assert seen["drawings"] >= 5
        assert seen["contrast"] >= 4.5  # of the faintest text, as WCAG asks
        assert seen["height"] < (4500 if width == 390 else 3000)
