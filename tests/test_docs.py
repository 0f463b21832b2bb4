"""What the pages show can be typed as it stands."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.overrides import parse_pairs
from paceline.cli.prepare import make_run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN_OPTIONS = ("--workers", "--out", "--max-restarts")
"""Options of `paceline train` and `paceline memory` that are no settings of a run, and have a value."""


def list_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def list_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words of every `paceline train` and `paceline memory`, from the command's name on."""
    for page in PAGES:
        for block in list_blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if "paceline" in words and words[-1] != "paceline":
                    rest = words[words.index("paceline") + 1 :]
                    if rest[0] in ("train", "memory"):
                        yield page.name, rest


COMMANDS = list(list_commands())


@pytest.fixture
def beside_the_files_shown(tmp_path, monkeypatch):
    """A directory with `mine.py` of the README, `net.py` of the page on layouts, and the examples."""
    (tmp_path / "mine.py").write_text(next(b for b in list_blocks(ROOT / "README.md", "python") if "def run()" in b))
    page = ROOT / "docs" / "layouts.md"
    (tmp_path / "net.py").write_text(next(b for b in list_blocks(page, "python") if "def run()" in b))
    (tmp_path / "script.py").write_text(next(b for b in list_blocks(page, "python") if "parallelize(" in b))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_run_on_a_page_is_a_valid_one(beside_the_files_shown):
    assert {"README.md", "layouts.md", "large_batch.md", "recipes.md"} <= {page for page, _ in COMMANDS}
    for page, (_, recipe, *options) in COMMANDS:
        if recipe == "--resume":
            recipe, *options = ["transformer_lm", *options[1:]]
        options = [option for option in options if option != "--go_on"]
        chosen = {}
        for option in OWN_OPTIONS:
            if option in options:
                place = options.index(option)
                chosen[option] = options[place + 1]
                del options[place : place + 2]
        run = make_run(recipe, parse_pairs(options))
        layout = run.layout
        num_workers = int(chosen.get("--workers", (layout.data or 1) * layout.sharded))
        axes = layout.resolve(num_workers * layout.ranks_of_worker)
        assert axes.size("data", "sharded") == num_workers, (page, options)
        assert run.global_batch >= num_workers, (page, options)


@pytest.mark.timeout(120)
def test_the_loop_over_a_layout_runs_as_it_stands(beside_the_files_shown):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"],
        cwd=beside_the_files_shown,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = dict(re.findall(r"rank (\d) of 2: loss (\d+\.\d{6})", done.stdout))
    assert set(losses) == {"0", "1"}
    assert losses["0"] == losses["1"]  # the two hold one model
    assert 5 < float(losses["0"]) < 5.9  # the bytes are random: 5.545 is all that can be learnt
