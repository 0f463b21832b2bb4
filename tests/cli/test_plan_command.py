"""`paceline plan`, and `paceline train --plan`."""

import io
import json
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.monitor.events import PlanCompared, StepFinished
from paceline.monitor.reader import read_log, select
from paceline.planner.plan_file import Plan
from paceline.training.run_file import RunFile

MODEL = '{"name": "decoder", "num_layers": 8, "width": 1024, "num_heads": 16, "vocabulary": 32000}'
SHAPE = ["plan", "--model", MODEL, "--cluster", "dgx_a100", "--num_ranks", "8", "--global_batch", "16"]
SMALL = [
    *("--model.width", "32", "--model.num_layers", "2", "--model.num_heads", "2", "--data.sequence_length", "32"),
    *("--data.max_bytes", "50000", "--num_steps", "4", "--evaluate_samples", "4", "--num_threads", "1"),
    *("--loss.sample_tokens", "0", "--schedule.warmup_steps", "1"),
]


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Return a function that calls the command line, and returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments):
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code or 0, capsys.readouterr()

    return invoke


def test_a_model_that_nobody_has_built_is_planned_with_reasons(call):
    code, said = call(*SHAPE, "--price", "40", "--num_steps", 1000, "--json", "all.json")
    assert code == 0
    document = json.loads(Path("all.json").read_text())
    assert f"plan: {document['choice']['plan']} on dgx_a100" in said.out
    assert "bound by" in said.out
    assert "twice the bandwidth inside hosts" in said.out
    assert "why not its neighbours:" in said.out
    assert f"front of {len(document['front'])}" in said.out
    assert document["choice"]["money"] == pytest.approx(40 * document["choice"]["step_s"] / 3600)
    assert "run of 1,000 steps: " in said.out
    plan = Plan.load(Path("plan.json"))
    assert plan.recipe is None
    assert plan.overrides == document["choice"]["overrides"]


def test_instance_types_have_the_price_of_the_table_and_carbon_is_a_limit_of_energy(call):
    arguments = [*SHAPE[:4], "aws_p4d_24xlarge", *SHAPE[5:], "--num_steps", 1000, "--json", "all.json"]
    code, said = call(*arguments, "--zone", "fra")
    assert code == 0
    document = json.loads(Path("all.json").read_text())["choice"]
    assert document["money"] == pytest.approx(32.77 * document["step_s"] / 3600)
    assert "price: 32.77 usd an hour a host (aws_p4d_24xlarge in us-east-1" in said.out
    assert "is an example" in said.out or "shipped ones are examples" in said.out
    assert document["carbon_kg"] == pytest.approx(0.056 * document["energy_j"] / 3.6e6)
    limit = 900 * document["carbon_kg"]  # of 1,000 steps
    code, said = call(*arguments, "--zone", "fra", "--carbon", f"{limit:.6f}kg")
    assert code == 2 or json.loads(Path("all.json").read_text())["choice"]["carbon_kg"] * 1000 <= limit * 1.001


def test_limits_change_the_choice(call):
    cheap = [*SHAPE, "--cluster", "dgx1", "--row", '{"precision": "fp16"}', "--num_steps", 10_000]
    prices = ["--price", "dgx_a100=40", "--price", "dgx1=2"]
    assert call(*cheap, *prices, "--out", "fast.json")[0] == 0
    assert call(*cheap, *prices, "--within", "8h", "--out", "cheap.json")[0] == 0
    fast, within = Plan.load(Path("fast.json")), Plan.load(Path("cheap.json"))
    assert (fast.machines.name, within.machines.name) == ("dgx_a100", "dgx1")
    assert fast.predicted.step_s < within.predicted.step_s < 8 * 3600 / 10_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*SHAPE[:3], "--cluster", "dgx_x100", *SHAPE[5:]], "must be a known name, but got 'dgx_x100'; did you mean"),
        ([*SHAPE, "--budget", "-3usd"], "--budget must be a positive amount such as 50usd, but got '-3usd'"),
        ([*SHAPE, "--within", "8"], "--within must be a positive amount such as 8h"),
        ([*SHAPE, "--within", "8h"], "--num_steps must be given with a limit of the whole run"),
        ([*SHAPE, "--budget", "5", "--num_steps", "9"], "--budget must go with a price of each cluster, but dgx_a100"),
        (
            [*SHAPE[:4], "aws_p4d_24xlarge", *SHAPE[5:], "--budget", "50eur", "--num_steps", "9"],
            "--budget and prices must be in one currency, but are in eur and usd",
        ),
        ([*SHAPE, "--price", "dgx1=4"], "--price must be of a cluster on offer, but got dgx1; they are: dgx_a100"),
        ([*SHAPE, "--price", "-4"], "--price must be a number of at least 0, but got '-4'"),
        ([*SHAPE, "--carbon", "2"], "--carbon must be a positive amount such as 2kg"),
        ([*SHAPE, "--zone", "xx"], "zone must be a known name, but got 'xx'"),
        ([*SHAPE, "--prices", "none.csv"], "none.csv"),
        ([*SHAPE, "--memory", "1GB"], "nothing fits: the nearest needs"),
        (
            [*SHAPE, "--row", '{"micro_batch": 2}'],
            "--row must leave out what is planned or has an option, but got micro",
        ),
        ([*SHAPE, "--row", "[]"], "--row must be a JSON object of fields"),
        ([*SHAPE, "--row", '{"tokns": 2}'], "tokns"),
        ([*SHAPE, "--optimizer.learning_rate", "1"], "overrides must be of a recipe"),
        ([*SHAPE, "mine.py:run"], "either a recipe or --model must be given, but got both"),
        (["plan"], "either a recipe or --model must be given, but got neither"),
        (SHAPE[:-2], "--global_batch must be given with --model"),
        (["plan", "--model", "{", *SHAPE[3:]], "--model must be JSON or a file of it"),
        (["plan", "--model", '{"name": "decodr"}', *SHAPE[3:]], "decodr"),
        (["plan", "transformer_lm", "--sync", "local_sgd"], "sync must be every_step without a codec to be planned"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, arguments, words):
    code, said = call(*arguments)
    assert code == 2
    assert words in said.err
    assert not Path("plan.json").exists()


def make_plan(call, *arguments):
    code, said = call("plan", "transformer_lm", *SMALL, "--num_ranks", 2, *arguments)
    assert code == 0, said.err
    assert "train it with: paceline train transformer_lm --plan plan.json" in said.out
    return Plan.load(Path("plan.json"))


def test_a_plan_that_is_not_of_the_recipe_or_the_settings_is_refused_before_anything_is_made(call):
    make_plan(call)
    for arguments, words in (
        (["resnet", "--plan", "plan.json"], "--plan must be of the recipe resnet, but it is of transformer_lm"),
        (["transformer_lm", "--plan", "plan.json", *SMALL, "--model.width", "16"], "must be of the model that is"),
        (["transformer_lm", "--plan", "none.json"], "--plan must be a file that can be read"),
    ):
        code, said = call("train", *arguments)
        assert code == 2
        assert words in said.err
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_a_plan_is_trained_as_it_was_planned_and_compared_with_its_steps(call, num_workers):
    plan = make_plan(call)
    if plan.num_workers != num_workers:  # planned for the other number
        layout = {"layout.data": num_workers, "layout.sharded": 1}
        plan = plan.model_copy(update={"overrides": plan.overrides | layout, "num_workers": num_workers})
        plan.save(Path("plan.json"))
    code, said = call("train", "transformer_lm", *SMALL, "--plan", "plan.json", "--out", "run")
    assert code == 0, said.err
    file = RunFile.load(Path("run"))
    assert file.num_workers == num_workers
    assert file.run["layout"]["data"] == num_workers
    assert file.run["num_micro_batches"] == plan.overrides["num_micro_batches"]
    assert Plan.load(Path("run/plan.json")) == plan
    records = read_log(Path("run/events.jsonl"))
    (compared,) = select(records, PlanCompared)
    assert compared.step == len(select(records, StepFinished)) == 4
    assert compared.event.predicted_s == plan.predicted.step_s
    assert compared.event.measured_s > 0
    assert "<h2>Plan</h2>" in Path("run/report.html").read_text()
    # Other settings are none of the plan's: its prediction goes.
    code, said = call("train", "--resume", "run", "--num_steps", 6, "--global_batch", 6)
    assert code == 0, said.err
    assert not Path("run/plan.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_plans_itself_trains_that_plan(call):
    code, said = call("train", "transformer_lm", *SMALL, "--plan", "auto", "--out", "run", "--workers", 1)
    assert code == 0, said.err
    plan, file = Plan.load(Path("run/plan.json")), RunFile.load(Path("run"))
    assert plan.num_workers == file.num_workers == 1
    assert "a step of all workers:" in said.out
    assert "plan: one rank" in said.out
    assert "written: " not in said.out
    code, said = call("train", "transformer_lm", *SMALL, "--plan", "auto", "--out", "run", "--go_on")
    assert (code, "nothing is left to do" in said.out) == (0, True), "it is resumed, not planned again"
    assert "a step of all workers:" not in said.out


def test_a_run_plans_itself_by_two_commands_and_only_where_it_begins(call, monkeypatch):
    commands = []

    class Command:
        """A command that fails."""

        def __init__(self, words, **_):
            commands.append(words[3:5])
            self.stdout = io.StringIO("one line\nwritten: somewhere\n")

        def wait(self, _):
            return 2

    monkeypatch.setattr("subprocess.Popen", Command)
    code, said = call("train", "transformer_lm", "--plan", "auto")
    assert (code, commands) == (2, [["profile", "transformer_lm"]])
    assert said.out == "one line\n"
    assert "`paceline profile` ended with 2 as it says above; train without --plan" in said.err
    Path("run").mkdir()
    Path("run/file").touch()
    for arguments, words in (
        (["transformer_lm", "--out", "run"], "--out must be a new or empty directory"),
        (["--resume", "run"], "--plan auto must be of a run that begins"),
    ):
        code, said = call("train", *arguments, "--plan", "auto")
        assert (code, words in said.err, len(commands)) == (2, True, 1), said.err
