"""What the README shows is what there is, and runs as it stands."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PACKAGES = {path.parent.name: path for path in (ROOT / "src/paceline").glob("*/__init__.py")}
TREE = dict(re.findall(r"^[├└]── (\w+)/ +(.+)$", README, flags=re.MULTILINE))


def find_block(language: str, containing: str) -> str:
    """Return the README's one code block of `language` with the words `containing`."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if containing in block]
    return found


def run(directory: Path, *command: str) -> str:
    """Run `command` in `directory` and return what it printed."""
    done = subprocess.run(
        [sys.executable, *command], cwd=directory, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tree_lists_exactly_the_packages():
    assert set(TREE) == set(PACKAGES)


def test_the_tree_says_what_the_packages_say():
    first_lines = {name: ast.get_docstring(ast.parse(path.read_text())) for name, path in PACKAGES.items()}
    said = {name: (text or "").splitlines()[0].partition(": ")[2].rstrip(".") for name, text in first_lines.items()}
    assert said == TREE


def test_the_tree_is_in_layer_order():
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    places = {name: -number for number, layer in enumerate(layers) for name in layer.split(" : ")}
    assert [*TREE] == sorted(TREE, key=lambda name: places[name])


@pytest.mark.timeout(120)
def test_the_loop_runs_as_it_stands_alone_and_on_two_workers_and_goes_on(tmp_path, monkeypatch, capfd):
    for number in ("1", "2"):
        (tmp_path / number).mkdir()
        (tmp_path / number / "script.py").write_text(find_block("python", containing="paceline.join()"))
    monkeypatch.chdir(tmp_path / "1")
    runpy.run_path("script.py")
    alone = capfd.readouterr().out
    both = run(tmp_path / "2", "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py")
    losses = re.findall(r"step (\d+): loss (\d\.\d{4}) on 1 workers", alone)
    assert [step for step, _ in losses] == ["16", "32", "48"]
    assert 0.1 < float(losses[-1][1]) < float(losses[0][1]) < 2.303  # the logarithm of 10 is guessing
    assert both == alone.replace("on 1 workers", "on 2 workers")
    runpy.run_path("script.py")
    assert capfd.readouterr().out == "", "all is done: it goes on from the last checkpoint, where nothing is left"


@pytest.mark.timeout(120)
def test_the_run_of_your_own_trains_as_it_stands(tmp_path, monkeypatch, run_here):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(find_block("python", containing="def run()"))
    done = run_here("train", "mine.py:run", "--workers", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    (loss,) = re.findall(r"finished: held-out loss ([\d.]+)", done.stdout)
    assert float(loss) < 0.69  # the logarithm of 2, 0.693, is guessing
    assert (tmp_path / "runs" / "mine-1" / "checkpoints" / "step-00000400").is_dir()


def test_the_files_it_points_to_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
