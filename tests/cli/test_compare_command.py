import json
import shutil

import pytest
from typer.testing import CliRunner

from paceline.benchmarks.codec_comparison import CodecRow
from paceline.cli.main import app
from paceline.errors import SettingsError
from paceline.launch import ExitCode
from paceline.launch import local as local_launch
from paceline.launch.worker import load_run
from paceline.monitor.events import RunFinished, RunStarted, StepFinished
from paceline.monitor.log import EventLog
from paceline.training.run import RunFile


def make_line(out, arguments):
    settings = ["--global_batch", "8", "--num_steps", "2", "--model.width", "8"]
    return [
        "compare",
        "codecs",
        "resnet",
        *settings,
        "--seeds",
        "1",
        "--only",
        "bf16",
        *map(str, ("--out", out, *arguments)),
    ]


def compare(out, *arguments):
    """Return the output of `paceline compare codecs`; what it refuses is raised."""
    result = CliRunner().invoke(app, make_line(out, arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture
def launched(monkeypatch):
    """Runs end at once, with a log that depends on their settings; the list has their directories."""
    directories = []

    def launch(directory, num_workers, *, view):
        directories.append(directory.name)
        run = load_run(RunFile.load(directory))
        codec = run.sync.codec.name
        with EventLog(directory / "events.jsonl", run=directory.name, rank=0, epoch=len(directories)) as log:
            write_log(log, codec, run.num_steps, run.seed)
        return ExitCode.FINISHED

    monkeypatch.setattr(local_launch, "launch", launch)
    return directories


def write_log(log, codec, num_steps, seed):
    start = RunStarted(
        recipe="resnet",
        settings={},
        num_workers=2,
        device="cpu",
        num_parameters=1,
        start_step=0,
        total_steps=num_steps,
        global_batch=8,
        samples_per_epoch=8,
    )
    log.write(start, step=0)
    for number in range(num_steps):
        step = StepFinished(
            loss=1.0,
            weight=8.0,
            num_samples=8,
            learning_rate=0.1,
            duration_s=0.1,
            communication_s=0.0,
            position=8 * number,
            wire_bytes=1000 if codec == "none" else 400,
        )
        log.write(step, step=number)
    loss = 2.0 + seed if codec == "none" else 3.0
    end = RunFinished(held_out_loss=loss, metrics={"accuracy": 0.5}, duration_s=1.0, samples_per_s=8.0)
    log.write(end, step=num_steps)


def test_each_way_is_trained_and_shown(tmp_path, launched):
    output = compare(
        tmp_path / "runs", "--seeds", "2", "--json", tmp_path / "rows.json", "--markdown", tmp_path / "rows.md"
    )
    assert launched == ["none-0", "bf16-0", "none-1", "bf16-1"]
    none, bf16 = (CodecRow(**row) for row in json.loads((tmp_path / "rows.json").read_text()))
    assert (none.codec, none.num_seeds, none.compression, none.loss) == ("none", 2, 1.0, 2.5)
    assert (bf16.codec, bf16.num_seeds, bf16.compression, bf16.loss) == ("bf16", 2, 2.5, 3.0)
    assert bf16.loss_ratio == pytest.approx((3 / 2 + 3 / 3) / 2)
    assert (tmp_path / "rows.md").read_text().splitlines()[3].startswith("| bf16 | 2.5x | 3.0000 | 1.250 |")
    assert "2.5x" in output
    assert "bf16, seed 1: held-out loss 3.0000" in output


def test_what_is_finished_is_kept_and_more_is_added(tmp_path, launched):
    compare(tmp_path)
    launched.clear()
    compare(tmp_path)
    assert launched == []
    compare(tmp_path, "--seeds", "2")
    assert launched == ["none-1", "bf16-1"]


def test_an_unfinished_run_goes_on(tmp_path, launched):
    compare(tmp_path)
    launched.clear()
    (tmp_path / "bf16-0" / "events.jsonl").unlink()
    compare(tmp_path)
    assert launched == ["bf16-0"]
    assert not (tmp_path / "bf16-0" / "run-1.json").exists(), "its settings have not changed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num_steps", "3"], "num_steps is 2 there and 3 here"),
        (["--optimizer.learning_rate", "0.5"], r"optimizer\.learning_rate is 0\.05 there and 0\.5 here"),
        (["--optimizer", "adamw"], r"optimizer\.name is sgd there and adamw here"),
        (["--workers", "3"], "workers is 2 there and 3 here"),
        (["--num_threads", "77"], "num_threads is [0-9]+ there and 77 here"),
    ],
    ids=["steps", "nested", "variant", "workers", "threads"],
)
@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "unfinished"])
def test_runs_of_other_settings_are_refused_before_any_is_trained(arguments, words, is_finished, tmp_path, launched):
    compare(tmp_path)
    launched.clear()
    shutil.rmtree(tmp_path / "none-0")
    if not is_finished:
        (tmp_path / "bf16-0" / "events.jsonl").unlink()
    with pytest.raises(SettingsError, match=f"in .*bf16-0 .*{words}.*; give the same again, or another --out"):
        compare(tmp_path, *arguments)
    assert launched == []
    assert not (tmp_path / "none-0").exists()


def test_a_run_that_fails_ends_the_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(local_launch, "launch", lambda directory, num_workers, *, view: ExitCode.FAILED)
    with pytest.raises(SettingsError, match=r"every run of a comparison must finish, but .*none-0 did not; read"):
        compare(tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("compare nothing", "comparison must be a known name, but got 'nothing'"),
        ("compare codecs --only top_k,gzip", "each of --only must be a known name, but got 'gzip'"),
        ("compare codecs --workers 1", "--seeds must be at least 1 and --workers 2, but got 3 and 1"),
        ("compare codecs --seeds 0", "but got 0 and 2"),
        ("compare codecs --json {old}", "--json must be a new file"),
        ("compare codecs --markdown {old}", "--markdown must be a new file"),
    ],
    ids=["comparison", "way", "workers", "seeds", "json", "markdown"],
)
def test_what_cannot_be_is_refused(line, words, tmp_path, launched):
    old = tmp_path / "old"
    old.touch()
    arguments = line.format(old=old).split()
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "runs")])
    assert isinstance(result.exception, SettingsError)
    assert words in str(result.exception)
    assert launched == []


def test_real_workers_are_compared(tmp_path, run_here):
    line = make_line(tmp_path / "runs", ["--json", tmp_path / "rows.json"])
    done = run_here(*line)
    assert done.returncode == 0, done.stdout + done.stderr
    none, bf16 = (CodecRow(**row) for row in json.loads((tmp_path / "rows.json").read_text()))
    assert none.compression == 1
    # Small blocks are sent as they are.
    assert 1.8 < bf16.compression < 2
    assert bf16.loss == pytest.approx(none.loss, rel=0.01)
