import json
import math
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from paceline.benchmarks import Workers
from paceline.benchmarks.reproductions import LanguageModelSync, find_reproduction, language_model_sync
from paceline.benchmarks.reproductions.base import Straggling, train_once
from paceline.benchmarks.reproductions.language_model_sync import SyncRow
from paceline.cli.main import app
from paceline.errors import SettingsError, UnknownNameError
from paceline.sync import ASGD

TINY = {"num_steps": 2, "global_batch": 2, "num_seeds": 1, "max_bytes": 300_000, "workers": {"num_workers": 1}}


def summary(duration_s, perplexity, share):
    event = SimpleNamespace(duration_s=duration_s, held_out_loss=math.log(perplexity))
    return SimpleNamespace(finish=SimpleNamespace(event=event), communication_share=share)


@pytest.fixture
def trained(monkeypatch):
    """Runs end at once, as they did where the published numbers come from; their settings."""
    runs = []

    def train(run, recipe, workers, straggling):
        runs.append(run)
        assert straggling == Straggling(0.1, 0.5)
        way = {"asgd": "asynchronous", "every_step": "synchronous"}[run.sync.name]
        if way == "synchronous" and run.sync.codec.name != "none":
            way = "compression"
        minutes, perplexity = {"synchronous": (45, 18.3), "asynchronous": (38, 18.7), "compression": (41, 18.5)}[way]
        return summary((1 + run.seed) * minutes, perplexity + run.seed, 0.2)

    monkeypatch.setattr(language_model_sync, "train_once", train)
    return runs


def test_ratios_stand_beside_the_published_ones(trained):
    synchronous, asynchronous, compression = LanguageModelSync(num_seeds=3).reproduce()
    assert [run.seed for run in trained] == [0, 0, 0, 1, 1, 1, 2, 2, 2], "ways take turns"
    assert synchronous.cells() == (
        "synchronous", "20%", "90.0 s", "1.000", "1.000 (45 min)", "19.300", "1.000", "1.000 (18.3)",
    )  # fmt: skip
    assert asynchronous.cells() == (
        "asynchronous", "20%", "76.0 s", "0.844", "0.844 (38 min)", "19.700", "1.021", "1.022 (18.7)",
    )  # fmt: skip
    assert compression.cells()[3:5] == ("0.911", "0.911 (41 min)")
    assert len(asynchronous.cells()) == len(asynchronous.headings)


def test_ways_differ_by_rule_and_asynchronous_rate(trained):
    LanguageModelSync(num_seeds=1, asynchronous=ASGD()).reproduce()
    synchronous, asynchronous, compression = trained
    assert asynchronous.optimizer.learning_rate == pytest.approx(synchronous.optimizer.learning_rate / 2)
    assert compression.sync.codec.name == "int8"
    alike = {"sync": synchronous.sync, "optimizer": synchronous.optimizer}
    assert asynchronous.model_copy(update=alike) == synchronous == compression.model_copy(update=alike)


def test_steps_of_as_many_pushes_as_workers_have_the_synchronous_rate(trained):
    LanguageModelSync(num_seeds=1).reproduce()
    assert trained[1].optimizer == trained[0].optimizer
    assert trained[1].sync.pushes_per_step == 4


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_is_trained_by_a_process_of_its_own_and_is_slow_when_told_to():
    benchmark = LanguageModelSync.model_validate(TINY)
    run = benchmark.make_run("synchronous", 0)
    found = train_once(run, "transformer_lm", benchmark.workers)
    slow = train_once(run, "transformer_lm", benchmark.workers, Straggling(1.0, 1.5))
    assert slow.finish.event.duration_s > 3, "two steps"
    assert slow.finish.event.held_out_loss == found.finish.event.held_out_loss
    assert found.finish.event.held_out_loss > 3
    assert found.finish.event.duration_s > 0
    assert [step.event.num_samples for step in found.steps] == [2, 2]


def test_a_run_that_fails_is_told_of(monkeypatch):
    monkeypatch.setattr(Workers, "start", lambda workers, function, *arguments: function(*arguments) and {0: 1})
    benchmark = LanguageModelSync.model_validate(TINY)
    run = benchmark.make_run("synchronous", 0)
    run = run.model_copy(update={"data": run.data.model_copy(update={"path": "/nowhere"})})
    with pytest.raises(
        SettingsError, match=r"every run of a reproduction must finish, but one did not: /nowhere must be"
    ):
        train_once(run, "transformer_lm", benchmark.workers)


def test_reproductions_are_listed():
    result = CliRunner().invoke(app, ["reproduce"])
    assert result.exit_code == 0
    assert "language-model-sync" in result.output
    assert "Time and perplexity of a Transformer language model" in result.output
    with pytest.raises(UnknownNameError, match=r"known: all, all-reduce, .*, language-model-sync"):
        find_reproduction("imagenet")


def test_the_command_prints_and_writes_the_table(trained, tmp_path):
    paths = ["--json", str(tmp_path / "rows.json"), "--markdown", str(tmp_path / "rows.md")]
    result = CliRunner().invoke(app, ["reproduce", "language-model-sync", "--num_seeds", "2", *paths])
    assert result.exit_code == 0, result.output
    assert len(trained) == 6
    rows = [SyncRow(**row) for row in json.loads((tmp_path / "rows.json").read_text())]
    assert [(row.way, row.num_seeds) for row in rows] == [
        ("synchronous", 2),
        ("asynchronous", 2),
        ("compression", 2),
    ]
    assert "0.844 (38 min)" in result.output
    assert (tmp_path / "rows.md").read_text().startswith("| way | waiting | time | to synchronous | published |")
    again = CliRunner().invoke(app, ["reproduce", "language-model-sync", *paths])
    assert isinstance(again.exception, SettingsError)
    assert "--json must be a new file" in str(again.exception)
