"""`paceline plan` of several recipes on one fleet."""

import json
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.planner.plan_file import Plan

FILE = """
from paceline.recipes import transformer_lm


def small():
    run = transformer_lm.run()
    model = run.model.model_copy(update={"width": 32, "num_layers": 1, "num_heads": 2})
    data = run.data.model_copy(update={"max_bytes": 50000, "sequence_length": 32})
    return run.model_copy(update={"model": model, "data": data, "global_batch": 4, "num_steps": 40})


def other():
    return small().model_copy(update={"num_steps": 400})
"""


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Return a function that calls `paceline plan`, and returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)

    def invoke(*arguments):
        monkeypatch.setattr(sys, "argv", ["paceline", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code or 0, capsys.readouterr()

    return invoke


def test_two_recipes_share_a_host_and_each_has_a_plan_to_train_by(call):
    code, said = call(
        "mine.py:small", "mine.py:other", "--cluster", "dgx_a100", "--num_ranks", 2, "--price", 8, "--clip_norm", 0.5,
        "--json", "all.json",
    )  # fmt: skip
    assert code == 0, said.err
    document = json.loads(Path("all.json").read_text())
    assert [run["name"] for run in document["runs"]] == ["mine.py:small", "mine.py:other"]
    assert document["is_proven"]
    assert document["end_s_low"] < document["end_s"] < document["end_s_high"]
    for place, run in enumerate(document["runs"], start=1):
        plan = Plan.load(Path(f"plan-{place}.json"))
        assert plan.recipe.endswith(run["name"])
        assert (run["file"], plan.words) == (f"plan-{place}.json", run["plan"])
        assert plan.machines.num_ranks <= len(run["ranks"])
        assert f"--plan plan-{place}.json" in said.out
        # More ranks are never slower, and are only listed where they are faster.
        times = [option["time_s"] for option in run["curve"]]
        assert times == sorted(times, reverse=True)
    assert set(document["compared"]) == {"even split", "first come"}
    assert "first come: " in said.out
    assert "fleet: 2 ranks of dgx_a100 on 1 host, for 2 runs" in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--measure", "2"], "--measure must be of one run, but got several recipes"),
        (["--model", "{}", "--cluster", "dgx1"], "--model must be of one run, but got several recipes"),
        (["--cluster", "dgx1", "--cluster", "dgx2"], "--cluster must be one for several runs, .* but got dgx1, dgx2"),
        (["--cluster", "dgx1", "--num_ranks", "1", "--num_steps", "1", "--budget", "5usd"], "--budget must go with a"),
    ],
)
def test_what_is_of_one_run_or_of_several_clusters_is_refused(call, arguments, words):
    import re

    code, said = call("mine.py:small", "mine.py:other", *arguments)
    assert code == 2
    assert re.search(words, " ".join(said.err.split()))
