import json
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from paceline.benchmarks.reproductions import LargeBatch, large_batch
from paceline.cli.main import app
from paceline.data.images import Images
from paceline.errors import SettingsError


def summary(accuracy, num_steps):
    event = None if accuracy is None else SimpleNamespace(event=SimpleNamespace(metrics={"accuracy": accuracy}))
    return SimpleNamespace(finish=event, steps=[None] * num_steps)


@pytest.fixture
def trained(monkeypatch):
    """Runs end at once: those of more than 1,024 samples diverge with seed 1; their settings."""
    runs = []

    def train(run):
        runs.append(run)
        diverges = run.global_batch > 1024 and run.seed == 1
        return summary(None if diverges else 0.9 + run.seed / 100 - run.global_batch / 1e5, run.num_steps)

    monkeypatch.setattr(large_batch, "_train", train)
    return runs


def reproduce(monkeypatch, **fields):
    monkeypatch.setattr(Images, "open", lambda data: SimpleNamespace(train=range(60_000)))
    return LargeBatch(**fields).reproduce()


def test_rows_tell_steps_rates_and_accuracy_beside_the_published(trained, monkeypatch):
    rows = reproduce(monkeypatch, batches=(64, 2048, 8192), num_epochs=2)
    by_way = {(row.way, row.batch): row for row in rows}
    assert by_way["sgd", 64].cells() == (
        "sgd", "64", "1,876", "0.01", "90.44%", "+0.00", "256: 24 h, 76.3%",
    )  # fmt: skip
    cells = by_way["linear, warm-up", 8192].cells()
    assert cells == (
        "linear, warm-up", "8,192", "16", "1.28", "81.81%, 1 of 2 diverged", "-8.13", "32,768: 1.2 h, 75.8%",
    )  # fmt: skip
    assert by_way["lamb, warm-up", 2048].published == "8,192: 2.2 h, 76.1%"
    assert by_way["lamb, warm-up", 8192].learning_rate == pytest.approx(LargeBatch().lamb.learning_rate * 128**0.5)
    assert len(cells) == len(rows[0].headings)
    assert [row.way for row in rows if row.batch == 64].count("linear") == 0, "nothing is scaled at the smallest"


def test_runs_differ_by_scale_and_warm_up_only(trained, monkeypatch):
    reproduce(monkeypatch, batches=(64, 2048), num_epochs=2, num_seeds=1)
    runs = {
        (run.global_batch, run.optimizer.scaling, run.optimizer.name, run.schedule.warmup_steps): run for run in trained
    }
    assert set(runs) == {
        (64, "none", "sgd", 0), (64, "linear", "sgd", 375),
        (64, "square_root", "adam", 375), (64, "square_root", "lars", 375), (64, "square_root", "lamb", 375),
        (2048, "none", "sgd", 0), (2048, "linear", "sgd", 0), (2048, "linear", "sgd", 12),
        (2048, "square_root", "adam", 12), (2048, "square_root", "lars", 12), (2048, "square_root", "lamb", 12),
    }  # fmt: skip
    for run in trained:
        assert run.num_steps == (1876 if run.global_batch == 64 else 60)
        assert (run.optimizer.base_batch, run.clip_norm, run.seed) == (64, None, 0)


@pytest.mark.parametrize(
    "fields",
    [{"batches": ()}, {"batches": (64, 32)}, {"batches": (0, 32)}, {"picture": "losses.pdf"}, {"warmup_fraction": 1}],
    ids=str,
)
def test_what_cannot_work_is_refused(fields):
    with pytest.raises(ValidationError, match=next(iter(fields))):
        LargeBatch.model_validate(fields)


def test_the_command_trains_prints_and_draws(tmp_path):
    picture, rows = tmp_path / "losses.png", tmp_path / "rows.json"
    settings = ["--batches", "[128,512,8192]", "--num_epochs", "1", "--num_seeds", "1", "--picture", str(picture)]
    result = CliRunner().invoke(app, ["reproduce", "large-batch", *settings, "--json", str(rows)])
    assert result.exit_code == 0, result.exception
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = {(row["way"], row["batch"]): row for row in json.loads(rows.read_text())}
    assert {batch for _, batch in found} == {128, 512}, "8192 images are more than there are"
    assert [found["sgd", batch]["num_steps"] for batch in (128, 512)] == [13, 4]
    assert found["sgd", 128]["accuracy"] > 0.3
    assert found["sgd", 128]["difference"] == 0
    assert found["linear", 512]["learning_rate"] == 4 * found["sgd", 512]["learning_rate"]
    assert found["linear", 512]["accuracy"] != found["sgd", 512]["accuracy"]
    with pytest.raises(SettingsError, match="batches must be at most half of the"):
        LargeBatch(batches=(1000,)).reproduce()


def test_a_run_that_diverges_is_told_of_and_ends():
    benchmark = LargeBatch(batches=(512,), num_epochs=2)
    benchmark = benchmark.model_copy(update={"sgd": benchmark.sgd.model_copy(update={"learning_rate": 1e30})})
    summary = large_batch._train(benchmark.make_run("sgd", 512, 1617, 0))
    assert summary.finish is None
    row = benchmark.describe("sgd", 512, [summary], [summary])
    assert (row.accuracy, row.difference, row.num_diverged) == (None, None, 1)
    assert row.cells()[4:6] == ("1 of 1 diverged", "")


def test_the_log_has_the_scaled_rate():
    benchmark = LargeBatch(batches=(64, 512), num_epochs=2)
    run = benchmark.make_run("lamb, warm-up", 512, 1617, 0)
    steps = large_batch._train(run).steps
    scaled = benchmark.lamb.learning_rate * 8**0.5
    assert [step.event.learning_rate for step in steps] == pytest.approx(
        [scaled * run.schedule.factor(number, 8) for number in range(8)]
    )


def test_a_signal_ends_all_runs(monkeypatch):
    monkeypatch.setattr(large_batch, "train", lambda *args, **kwargs: False)
    with pytest.raises(KeyboardInterrupt):
        large_batch._train(LargeBatch().make_run("sgd", 64, 1617, 0))
