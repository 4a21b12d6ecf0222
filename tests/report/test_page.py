import dataclasses
import datetime
import importlib.metadata
import re

import numpy as np
import pytest

from pipeline.report import Options, format_page, from_lengths, measure

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
