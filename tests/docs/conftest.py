"""A directory like a reader's, and runs that pages speak of."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT, write_files

from paceline import registry
from paceline.cli.prepare import prepare_new
from paceline.comm import LocalGroup
from paceline.launch import ExitCode
from paceline.launch.worker import work
from paceline.training.run_file import RunFile

SMALL = {"model.width": 16, "model.num_layers": 1, "model.num_heads": 1, "data.sequence_length": 16, "global_batch": 2}


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Be a reader in a directory with the files that pages show; what they register is forgotten afterwards."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)
    yield tmp_path
    places = (str(tmp_path), str(ROOT / "examples"))
    files = {name: str(getattr(sys.modules[name], "__file__", None)) for name in set(sys.modules) - modules}
    for name in [name for name, file in files.items() if file.startswith(places)]:
        del sys.modules[name]
    left = {name for name in sys.modules if name != "__main__"}  # where a page's script ran
    for known in registry._VARIANTS.values():
        for variant in [key for key, kind in known.items() if kind.__module__ not in left]:
            del known[variant]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with `mine.py` and two runs: one of it, and one of 400 steps, tiny, as of `make train`."""
    directory = tmp_path_factory.mktemp("trained")
    write_files(directory)
    few = {"num_steps": 20, "evaluate_interval": 0, "keep_best": "loss", "num_threads": 1}
    small = {**few, **SMALL, "num_steps": 400, "data.max_bytes": 20_000, "evaluate_samples": 4, "loss.sample_tokens": 0}
    for name, recipe, settings in (
        ("transformer_lm", "transformer_lm", small),
        ("mine", f"{directory / 'mine.py'}:run", few),
    ):
        run = directory / "runs" / name
        prepare_new(recipe, 1, run, [(path, str(value)) for path, value in settings.items()])
        assert work(run, RunFile.load(run), LocalGroup(), 0) is ExitCode.FINISHED
    return directory


@pytest.fixture
def after_a_run(reader: Path, trained: Path) -> Path:
    """Be a reader who has trained, under each name that pages have for a run."""
    for name, run in (("transformer_lm-1", "transformer_lm"), ("first", "mine"), ("mine-1", "mine")):
        directory = shutil.copytree(trained / "runs" / run, reader / "runs" / name)
        file = (directory / "run.json").read_text()
        (directory / "run.json").write_text(file.replace(str(trained), str(reader)))
    return reader
