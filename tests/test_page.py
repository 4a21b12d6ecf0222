import re

import pytest

from pipeline.report import Options, measure
from pipeline.report.page import page
from pipeline.report.subject import of_corpus
from tests.browser import CHROMIUM, look


@pytest.fixture(scope="module")
def figures(corpus):
    # A narrow model, for which several buckets are worth it.
    options = {"tokens_per_batch": 512, "max_length": 64, "length_multiple": 8, "width": 4}
    return measure(of_corpus(corpus, "the corpus"), Options({**options, "row_multiple": 4}))


def test_the_page_needs_no_network_and_no_script(figures):
    text = page(figures)
    assert "<script" not in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:,)""", text)
    assert "url(" not in text
    assert "http" not in text
    for each in figures["strategies"]:
        assert each["name"] in text
    for unit in ("length, positions", "padding, % of positions", "step of the epoch", "rows, %"):
        assert unit in text


def test_the_page_shows_names_as_they_are(figures):
    text = page({**figures, "name": "<b>&</b>"})
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
        file.write_text(page(figures))
        seen = look(file, tmp_path, width=width, dark=dark)
        assert seen["console"] == []
        assert seen["problems"] == []
        assert (seen["width"], seen["dark"]) == (width, dark)
        assert seen["drawings"] >= 8
        assert seen["contrast"] >= 4.5  # of the faintest text, as WCAG asks
