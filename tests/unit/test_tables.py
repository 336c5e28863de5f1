"""Tables: columns line up, Markdown is Markdown, and a page changes only between its marks."""

import pytest

from arpg.tables import fill_page, markdown_table, text_table


def test_text_columns_line_up():
    text = text_table(["task", "score", "of it"], [["counting", "0.5", None], ["two", "12.25", "0.9"]])
    assert text.split("\n") == ["task      score  of it", "counting    0.5      -", "two       12.25    0.9"]


def test_text_columns_can_all_be_left():
    text = text_table(["a", "notes"], [["x", "short"], ["longer", ""]], align="l")
    assert text.split("\n") == ["a       notes", "x       short", "longer"]


def test_markdown():
    assert markdown_table(["order", "FID"], [["random", 2.5], ["raster", None]]) == (
        "| order | FID |\n|---|---:|\n| random | 2.5 |\n| raster |  |\n"
    )


def test_a_page_is_filled_between_its_marks():
    page = "before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n"
    assert fill_page(page, {"a": "new\n"}) == page.replace("old", "new")
    with pytest.raises(AssertionError, match="0 places for b"):
        fill_page(page, {"b": ""})
