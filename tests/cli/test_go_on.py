"""`paceline train ... --out X --go_on`: one command that starts, goes on, or says that all is done."""

import errno
import io
import os
import signal
import sys
from contextlib import redirect_stdout

import pytest

from paceline.cli.main import main
from paceline.cli.prepare import taking_back
from paceline.errors import StorageError
from paceline.monitor.events import RunFinished, RunStarted, StepFinished
from paceline.monitor.reader import read_log, select
from paceline.testing import run_processes
from paceline.training import run_file
from paceline.training.run_file import RunFile

RECIPE = """
from paceline.recipes.transformer_lm import run as base


def run():
    return base().model_copy(update={"seed": 3})
"""
SETTINGS = {
    "checkpoint_interval": 2,
    "evaluate_samples": 4,
    "schedule.warmup_steps": 1,
    "loss.sample_tokens": 0,
    "model.width": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "data.sequence_length": 16,
    "data.max_bytes": 100_000,
    "global_batch": 4,
    "num_threads": 1,
    "memory.check": "false",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_going.py").write_text(RECIPE)
    yield tmp_path
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]
    sys.modules.pop("own_going", None)


def make_command(recipe="own_going.py", **settings):
    overrides = [word for name, value in (SETTINGS | settings).items() for word in (f"--{name}", str(value))]
    return ["train", str(recipe), "--out", "run", "--go_on", *overrides]


def refuse(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    return capsys.readouterr().err


def select_here(kind):
    return select(read_log("run/events.jsonl"), kind)


@pytest.mark.timeout(120)
def test_one_command_starts_goes_on_and_finds_that_all_is_done(here, run_here, monkeypatch):
    (here / "run").mkdir()
    (here / "run" / ".run.json.123").write_text("{")  # it was killed while it wrote its first file
    with monkeypatch.context() as patch:
        patch.setattr("paceline.monitor.report.write_report", lambda _: os.kill(os.getpid(), signal.SIGTERM))
        patch.setattr("paceline.launch.signals.leave", sys.exit)
        begun = run_here(*make_command(num_steps=4), "--workers", 2)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    assert "goes on" not in begun.stdout
    assert "stopped by SIGTERM after the run was finished; its report: paceline train --resume" in begun.stderr
    assert not (here / "run" / "report.html").exists()
    resumed = run_here("train", "--resume", "run", "--workers", 1)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "is finished, at step 4 of 4: nothing is left to do" in resumed.stdout
    assert RunFile.load(here / "run").num_workers == 2

    (here / "run" / "report.html").unlink()  # as where the job was over before it was written
    done = run_here(*make_command(num_steps=4), "--workers", 2)
    assert (done.returncode, len(select_here(RunStarted))) == (0, 1)
    assert "the run in run is finished, at step 4 of 4: nothing is left to do" in done.stdout
    assert (here / "run" / "report.html").exists()

    (here / "own_going.py").write_text(RECIPE.replace('"seed": 3', '"clip_norm": 0.5'))
    sys.modules.pop("own_going")
    more = run_here(*make_command(num_steps=6), "--workers", 1)
    assert more.returncode == 0, more.stdout + more.stderr
    assert more.stdout.splitlines()[:5] == [
        "goes on with the run that was begun in run",
        "kept as begun: clip_norm 1.0, though a new run would now have 0.5; --clip_norm changes it",
        "kept as begun: seed 3, though a new run would now have 0; --seed changes it",
        "changed by the command line: num_steps from 4 to 6",
        "changed by the command line: workers from 2 to 1",
    ]
    assert select_here(RunStarted)[-1].event.start_step == 4
    assert [record.step for record in select_here(StepFinished)] == [1, 2, 3, 4, 5, 6]
    file = RunFile.load(here / "run")
    assert (file.num_workers, file.run["seed"], file.run["clip_norm"]) == (1, 3, 1.0)


def test_another_recipe_is_refused(here, monkeypatch, capsys):
    (here / "run").mkdir()
    RunFile(recipe=f"{here / 'other.py'}:run", num_workers=1, run={}).save(here / "run")
    error = refuse(monkeypatch, capsys, *make_command())
    assert f"--go_on must be given the recipe that the run was begun with, {here / 'other.py'}:run, but got" in error


@pytest.mark.parametrize(
    "arguments", [["own_going.py"], ["--resume", "run"], ["--resume", "run", "--out", "run"]], ids=" ".join
)
def test_what_says_not_where_is_refused(here, monkeypatch, capsys, arguments):
    assert "--go_on must be given with a recipe and --out" in refuse(
        monkeypatch, capsys, "train", "--go_on", *arguments
    )


def test_a_directory_of_something_else_is_refused(here, monkeypatch, capsys):
    (here / "run").mkdir()
    (here / "run" / "thesis.txt").write_text("years of work")
    assert "--out must be a new or empty directory" in refuse(monkeypatch, capsys, *make_command())


def test_at_no_instant_a_run_has_no_file(tmp_path, monkeypatch):
    file = RunFile(recipe="transformer_lm", num_workers=1, run={})
    file.save(tmp_path)
    replace = type(tmp_path).replace
    there = []
    monkeypatch.setattr(
        type(tmp_path), "replace", lambda *paths: (there.append((tmp_path / "run.json").exists()), replace(*paths))
    )
    file.model_copy(update={"num_workers": 2}).save(tmp_path)
    assert there == [True, True]
    assert RunFile.load(tmp_path).num_workers == 2
    assert (tmp_path / "run-1.json").exists()


@pytest.mark.parametrize("fails", ["new", "old"])
def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, fails):
    def fail_to_write(path, content):
        path.touch()
        if path.name.endswith(fails):
            raise OSError(errno.ENOSPC, "No space left on device")

    file = RunFile(recipe="transformer_lm", num_workers=1, run={})
    file.save(tmp_path)
    monkeypatch.setattr(run_file, "write_file", fail_to_write)
    with pytest.raises(StorageError, match=r"run.json could not be written: No space left on device; free space"):
        file.model_copy(update={"num_workers": 2}).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert RunFile.load(tmp_path) == file


def test_a_change_whose_launch_fails_is_taken_back(tmp_path):
    file = RunFile(recipe="transformer_lm", num_workers=1, run={})
    file.save(tmp_path)

    def fail_to_launch():
        file.model_copy(update={"num_workers": 2}).save(tmp_path)
        assert RunFile.load(tmp_path) != file
        raise StorageError("no workers")

    with pytest.raises(StorageError, match="no workers"), taking_back(tmp_path):
        fail_to_launch()
    assert RunFile.load(tmp_path) == file
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def be_a_worker_of_torchrun(directory, arguments):
    os.chdir(directory)
    sys.argv = ["paceline", *arguments]
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit) as exit_:
        main()
    return [int(exit_.value.code or 0), said.getvalue()]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_under_torchrun_too(here):
    for num_steps, num_starts, said in [
        (2, 1, "2 workers"),
        (2, 1, "finished, at step 2 of 2: nothing is left to do"),
        (4, 2, "changed by the command line: num_steps from 2 to 4"),
    ]:
        options = {"directory": str(here), "arguments": make_command(num_steps=num_steps)}
        results = run_processes(2, be_a_worker_of_torchrun, options)
        assert [result.value and result.value[0] for result in results] == [0, 0], results[0].output
        assert said in results[0].value[1]
        assert len(select_here(RunStarted)) == num_starts
    assert select_here(RunStarted)[-1].event.start_step == 2
    assert len(select_here(RunFinished)) == 2
    before = RunFile.load(here / "run")
    options = {"directory": str(here), "arguments": make_command(num_steps=6, **{"model.width": 32})}
    results = run_processes(2, be_a_worker_of_torchrun, options)
    assert results[0].value[0] == 2, results[0].output
    assert RunFile.load(here / "run") == before, "what was refused is taken back"
