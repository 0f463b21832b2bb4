import json
import statistics

import pytest
from typer.testing import CliRunner

from paceline.benchmarks import ConvergenceBenchmark, Workers
from paceline.benchmarks.convergence import describe_rule, train_rules
from paceline.benchmarks.language import LanguageTask
from paceline.cli.main import app
from paceline.sync import DiLoCo, EveryStep, LocalSGD, StreamingDiLoCo
from paceline.testing import check_exits, run_processes

TINY = LanguageTask(
    width=16, num_layers=1, num_heads=2, sequence_length=8, max_bytes=300_000, held_out_samples=4, num_steps=6
)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (EveryStep(), "every_step"),
        (EveryStep(codec={"name": "int8"}), "every_step int8"),
        (EveryStep(codec={"name": "top_k", "density": 0.02}), "every_step top_k density 0.02"),
        (LocalSGD(period=5, synchronous_steps=20), "local_sgd, period 5, synchronous_steps 20"),
        (DiLoCo(codec={"name": "int8"}, outer_momentum=0.5), "diloco int8, outer_momentum 0.5"),
        (StreamingDiLoCo(codec={"name": "none"}, delay=2), "streaming_diloco, delay 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rule_is_called_by_what_it_was_given(rule, words):
    assert describe_rule(rule) == words


def test_each_rule_stands_beside_every_step_of_the_same_seeds(monkeypatch):
    """What workers learn is scripted here; seed 1 is hard for all."""

    def start(workers, function, tasks, rules):
        assert function is train_rules
        json.dumps([tasks, rules])  # it goes to hosts so
        assert [task["seed"] for task in tasks] == [7, 8, 9]
        assert [rule["name"] for rule in rules] == ["every_step", "local_sgd", "diloco"]
        losses = {"every_step": [2.0, 4.0, 2.0], "local_sgd": [2.2, 4.4, 2.2], "diloco": [2.0, 4.0, 2.4]}
        sent = {"every_step": 1000.0, "local_sgd": 250.0, "diloco": 100.0}
        results = [{"loss": losses[rule["name"]], "sent": [sent[rule["name"]]] * 3} for rule in rules]
        return dict.fromkeys(range(workers.num_workers), results)

    monkeypatch.setattr(Workers, "start", start)
    rows = ConvergenceBenchmark(rules=(LocalSGD(), DiLoCo()), num_seeds=3, first_seed=7, task=TINY).measure()
    local, local_sent, diloco, diloco_sent = rows
    assert (local.case, local.metric) == ("local_sgd", "held-out loss, 6 steps, 3 seeds")
    assert (local.ours, local.reference) == pytest.approx((8.8 / 3, 8 / 3))
    assert (local.ratio, local.ratio_lower, local.ratio_upper) == pytest.approx((1.1, 1.1, 1.1))
    assert diloco.ratio == pytest.approx(8.4 / 8)
    assert 1.0 == diloco.ratio_lower < diloco.ratio < diloco.ratio_upper <= 1.2
    assert (local_sent.ratio, diloco_sent.ratio) == (0.25, 0.1)
    assert (local_sent.ratio_lower, local_sent.ratio_upper) == (None, None)


def test_rules_are_given_on_the_command_line(monkeypatch, tmp_path):
    asked = []

    def start(workers, function, tasks, rules):
        asked.append(rules)
        return {0: [{"loss": [2.0], "sent": [8.0]}] * len(rules)}

    monkeypatch.setattr(Workers, "start", start)
    rules = [{"name": "every_step", "codec": {"name": "top_k"}, "dense_steps": 30}, {"name": "easgd"}]
    line = ["bench", "convergence", "--num_seeds", "1", "--rules", json.dumps(rules), "--json"]
    result = CliRunner().invoke(app, [*line, str(tmp_path / "rows.json")])
    assert result.exception is None, result.output
    assert [(rule["name"], rule.get("dense_steps")) for rule in asked[0]] == [
        ("every_step", 0),
        ("every_step", 30),
        ("easgd", None),
    ]
    cases = [row["case"] for row in json.loads((tmp_path / "rows.json").read_text())]
    assert cases == ["every_step top_k, dense_steps 30"] * 2 + ["easgd"] * 2


def test_workers_train_with_every_rule_and_seed():
    tasks = [TINY.model_copy(update={"seed": seed}).model_dump(mode="json") for seed in (0, 1)]
    rules = [EveryStep(), LocalSGD(period=2, synchronous_steps=6), LocalSGD(period=2, synchronous_steps=2)]
    arguments = {"tasks": tasks, "rules": [rule.model_dump(mode="json") for rule in rules]}
    # As hosts start it: one import for all workers.
    results = run_processes(2, "paceline.benchmarks.convergence:train_rules", arguments, timeout_s=55)
    check_exits(results)
    every, synchronous, local = results[0].value
    assert synchronous == every, "it never ended to be synchronous"
    assert len(set(every["loss"])) == 2, "seeds differ"
    assert all(4 < loss < 6 for loss in every["loss"]), "of random guesses, nearly"
    assert all(ours != theirs for ours, theirs in zip(local["loss"], every["loss"], strict=True))
    # Two synchronous steps, and two sync steps for the four others.
    assert statistics.mean(local["sent"]) == pytest.approx(4 / 6 * statistics.mean(every["sent"]), rel=1e-3)
