"""The notebook of examples/ is executed, and its kept outputs are compared."""

import re

from tests.notebook import TOUR, execute, read_cells


def test_the_tour_prints_and_draws_what_it_keeps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = read_cells(TOUR)
    for cell, outputs in zip(cells, execute(cells), strict=True):
        assert outputs == cell.get("outputs", []), "".join(cell["source"])
    assert any("equal to the bit: True" in f"{cell.get('outputs')}" for cell in cells)


def test_the_links_of_the_tour_lead_to_pages():
    for cell in read_cells(TOUR):
        if cell["cell_type"] == "markdown":
            for link in re.findall(r"\]\((?!http)([^)#]+)", "".join(cell["source"])):
                assert (TOUR.parent / link).exists(), link
