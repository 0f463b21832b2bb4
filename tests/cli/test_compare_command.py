import json
import shutil

import pytest
from typer.testing import CliRunner

from paceline.benchmarks import COMPARISONS
from paceline.benchmarks.way_rows import WayRow
from paceline.cli import compare_runs
from paceline.cli.main import app
from paceline.cli.prepare import make_run
from paceline.comm.pacing import HEADERS
from paceline.errors import SettingsError
from paceline.launch import ExitCode
from paceline.launch.worker import load_run
from paceline.monitor.events import Evaluated, Failed, RunFinished, RunStarted, StepFinished
from paceline.monitor.log import EventLog
from paceline.training.rehearsal import outline
from paceline.training.run_file import RunFile


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
    """Runs end at once, with a log that depends on their settings; the list has their directories.

    The codec int8 fails, fp16 is refused, and power_sgd is asked to stop.
    """
    directories = []
    ends = {
        "int8": (ExitCode.FAILED, Failed(error="RuntimeError", message="no luck\nat all", traceback="")),
        "fp16": (ExitCode.REFUSED, Failed(error="SettingsError", message="fp16 must not be", traceback="")),
        "power_sgd": (ExitCode.PREEMPTED, None),
    }

    def launch(directory, num_workers, *, view):
        directories.append(directory.name)
        run = load_run(RunFile.load(directory))
        code, failure = ends.get(run.sync.codec.name, (ExitCode.FINISHED, None))
        with EventLog(directory / "events.jsonl", run=directory.name, rank=0, epoch=len(directories)) as log:
            if failure is not None:
                log.write(failure, step=-1)
            elif code is ExitCode.FINISHED:
                write_log(log, run.sync.codec.name, run.num_steps, run.seed)
        return code

    monkeypatch.setattr(compare_runs, "launch", launch)
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
    for step, held_out in ((1, 2 * loss), (num_steps, loss)):
        log.write(Evaluated(loss=held_out, metrics={}, num_samples=8, duration_s=0.1), step=step)
    end = RunFinished(held_out_loss=loss, metrics={"accuracy": 0.5}, duration_s=1.0, samples_per_s=8.0)
    log.write(end, step=num_steps)


def read_rows(path):
    """Return the advice, and the rows by way, in order."""
    document = json.loads(path.read_text())
    return document["advice"], {row["way"]: WayRow(**row) for row in document["rows"]}


def test_each_way_is_trained_and_shown(tmp_path, launched):
    output = compare(
        tmp_path / "runs", "--seeds", "2", "--json", tmp_path / "rows.json", "--markdown", tmp_path / "rows.md"
    )
    assert launched == ["none-0", "bf16-0", "none-1", "bf16-1"]
    advice, rows = read_rows(tmp_path / "rows.json")
    assert list(rows) == ["none", "bf16"]
    none, bf16 = rows.values()
    assert (none.is_reference, none.num_seeds, none.bytes_per_step, none.losses) == (True, 2, 1000, [2.0, 3.0])
    assert (none.steps_to_loss, none.step_s) == (pytest.approx(1 + 2.45 / 2.5), pytest.approx(0.1))
    assert (bf16.is_reference, bf16.bytes_per_step, bf16.losses, bf16.time_to_loss_s) == (False, 400, [3.0, 3.0], None)
    assert bf16.loss_ratio == pytest.approx(6 / 5)
    assert advice == "Stay with none: on this machine no other way is 1.05 times as fast within 2 % of its last loss."
    lines = (tmp_path / "rows.md").read_text().splitlines()
    assert lines[3] == "| bf16 | not reached |  | 0.1 s | 400 B | 3.0000 | 1.200 | 50.00% | loss above 1.05 |"
    assert lines[4:] == ["", advice]
    assert advice in output
    assert "bf16, seed 1: held-out loss 3.0000 after 2 steps" in output


def test_losses_count_as_equal_within_the_margin_given(tmp_path, launched):
    compare(tmp_path / "runs", "--within", "0.5", "--json", tmp_path / "rows.json")
    advice, rows = read_rows(tmp_path / "rows.json")
    assert rows["bf16"].time_to_loss_s is not None
    assert advice.endswith("within 50 % of its last loss.")


def test_curves_have_points_enough(tmp_path, launched):
    compare(tmp_path / "own", "--num_steps", "200")
    assert load_run(RunFile.load(tmp_path / "own" / "none-0")).evaluate_interval == 10
    compare(tmp_path / "given", "--num_steps", "200", "--evaluate_interval", "100")
    assert load_run(RunFile.load(tmp_path / "given" / "none-0")).evaluate_interval == 100
    compare(tmp_path / "fine", "--num_steps", "2000")
    assert load_run(RunFile.load(tmp_path / "fine" / "none-0")).evaluate_interval == 30, "the recipe's own"


def test_times_are_priced_for_hosts(tmp_path, launched):
    """Every run has as many workers as there are hosts, and computing is measured with one of them."""
    line = ("--hosts", "4", "--bandwidth", "1mbit", "--latency_s", "0", "--json", tmp_path / "rows.json")
    output = compare(tmp_path / "runs", "--num_steps", "100", *line)
    assert launched == ["computing-of-1-in-4", "none-0", "bf16-0"]
    alone = RunFile.load(tmp_path / "runs" / "computing-of-1-in-4")
    assert (alone.num_workers, load_run(alone).global_batch, load_run(alone).num_steps) == (1, 2, 30)
    assert RunFile.load(tmp_path / "runs" / "none-0").num_workers == 4
    assert "computing of a step, one worker of 4 alone: 100 ms" in output
    advice, rows = read_rows(tmp_path / "rows.json")
    none, bf16 = rows["none"], rows["bf16"]
    num_parameters = sum(p.numel() for p in outline_resnet().parameters())
    # 3/4 of them are sent twice, in one bucket, which is ready when backward ends, so that nothing hides it.
    exposed_s = 1.5 * 4 * HEADERS * num_parameters / 125_000
    assert none.step_s == pytest.approx(0.1 + exposed_s, rel=1e-3)
    assert bf16.step_s < 0.6 * none.step_s
    assert "on 4 hosts at 1 Mbit/s" in advice


def outline_resnet():
    run = make_run("resnet", [("model.width", "8")])
    return outline(run.model, run.open_data())


def test_a_way_that_fails_is_a_row_with_the_reason(tmp_path, launched):
    line = [*make_line(tmp_path / "runs", ["--seeds", "2", "--json", tmp_path / "rows.json"]), "--only", "int8,bf16"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 1
    assert launched == ["none-0", "int8-0", "bf16-0", "none-1", "bf16-1"]
    _, rows = read_rows(tmp_path / "rows.json")
    assert list(rows) == ["none", "bf16", "int8"]
    assert (rows["int8"].failure, rows["int8"].loss) == ("no luck at all", None)
    assert "no luck at all" in result.output
    launched.clear()
    CliRunner().invoke(app, [*line[: line.index("--json")], "--only", "int8,bf16"])
    assert launched == ["int8-0"], "what failed is tried again, and the rest is kept"


@pytest.mark.parametrize(("only", "code"), [("fp16", 1), (None, 0)])
def test_a_way_that_does_not_fit_the_run_fails_only_who_asked_for_it(only, code, tmp_path, launched, monkeypatch):
    monkeypatch.setitem(
        COMPARISONS, "codecs", lambda names, **given: {n: [("sync.codec", n)] for n in ("none", "fp16")}
    )
    line = make_line(tmp_path / "runs", [])
    place = line.index("--only")
    result = CliRunner().invoke(app, [*line[:place], *line[place + 2 :], *(["--only", only] if only else [])])
    assert result.exit_code == code, result.output
    assert "fp16 must not be" in result.output


def test_a_signal_ends_the_comparison(tmp_path, launched):
    result = CliRunner().invoke(app, [*make_line(tmp_path / "runs", []), "--only", "power_sgd,bf16"])
    assert result.exit_code == ExitCode.PREEMPTED
    assert launched == ["none-0", "power_sgd-0"]
    assert "the same command goes on from there" in result.output


@pytest.mark.parametrize("arguments", [[], ["--stop_after", "3"]], ids=["as it is", "a run that may end early"])
def test_what_is_finished_is_kept_and_more_is_added(arguments, tmp_path, launched):
    compare(tmp_path, *arguments)
    launched.clear()
    compare(tmp_path, *arguments)
    assert launched == []
    compare(tmp_path, *arguments, "--seeds", "2")
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


def test_a_reference_that_fails_ends_the_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_runs, "launch", lambda directory, num_workers, *, view: ExitCode.FAILED)
    with pytest.raises(SettingsError, match=r"the reference of a comparison must finish, but .*none-0 did not: no rea"):
        compare(tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("compare nothing", "comparison must be a known name, but got 'nothing'"),
        ("compare codecs --only top_k,gzip", "each of --only must be a known name, but got 'gzip'"),
        ("compare codecs --workers 1", "--seeds must be at least 1 and --workers 2, but got 3 and 1"),
        ("compare codecs --seeds 0", "but got 0 and 2"),
        ("compare codecs --within 1", "--within must be at least 0 and less than 1, but got 1"),
        ("compare codecs --hosts 4", "--hosts and --bandwidth must be given together, but got 4 and None"),
        ("compare codecs --bandwidth 1gbit", "--hosts and --bandwidth must be given together, but got None and 1gbit"),
        ("compare codecs --hosts 1 --bandwidth 1gbit", "--hosts must be at least 2, but got 1"),
        ("compare codecs --hosts 4 --bandwidth 1gbit --workers 2", "but got 4 and --workers 2; leave out --workers"),
        ("compare codecs --hosts 4 --bandwidth fast", "a speed must be like 50mbit, 100gbit"),
        ("compare codecs --hosts 4 --bandwidth 50", "with its unit, and positive, but got '50'"),
        ("compare codecs --hosts 4 --bandwidth 1gbit --latency_s -1", "--latency_s must be at least 0 and finite"),
        ("compare gossip --hosts 4", "must be left out of compare gossip, but got 4"),
        ("compare codecs --json {old}", "--json must be a new file"),
        ("compare codecs --markdown {old}", "--markdown must be a new file"),
    ],
)
def test_what_cannot_be_is_refused(line, words, tmp_path, launched):
    old = tmp_path / "old"
    old.touch()
    arguments = line.format(old=old).split()
    place = [] if "gossip" in line else ["--out", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, [*arguments, *place])
    assert isinstance(result.exception, SettingsError)
    assert words in str(result.exception)
    assert launched == []


@pytest.mark.slow
def test_real_workers_are_compared(tmp_path, run_here):
    line = make_line(tmp_path / "runs", ["--json", tmp_path / "rows.json"])
    done = run_here(*line)
    assert done.returncode == 0, done.stdout + done.stderr
    _, rows = read_rows(tmp_path / "rows.json")
    none, bf16 = rows["none"], rows["bf16"]
    # Small blocks are sent as they are.
    assert 1.8 < none.bytes_per_step / bf16.bytes_per_step < 2
    assert bf16.loss == pytest.approx(none.loss, rel=0.01)
