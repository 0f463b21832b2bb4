"""Each block of Python on a page runs as it stands."""

import ast
import re
import runpy
from collections import Counter

import pytest
from pages import ROOT, list_blocks

BLOCKS = list_blocks("python")


def test_a_file_has_one_text():
    files = Counter(block.file for block in BLOCKS if block.file)
    assert {"mine.py", "script.py", "points.py", "own_loop.py", "gan.py", "my_rule.py", "my_codec.py"} <= set(files)
    assert set(files.values()) == {1}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs_as_it_stands(block, after_a_run):
    path = after_a_run / (block.file or "block.py")
    path.write_text(block.text)
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_has_lines_that_a_page_can_show(block):
    ast.parse(block.text)
    assert max(map(len, block.text.splitlines())) <= 120


def test_the_files_that_pages_include_exist():
    included = [
        (page.name, file)
        for page in (ROOT / "docs").glob("*.md")
        for file in re.findall(r"\{literalinclude\} (\S+)", page.read_text())
    ]
    assert included
    assert [place for place in included if not (ROOT / "docs" / place[1]).is_file()] == []
