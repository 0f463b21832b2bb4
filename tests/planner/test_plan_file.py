"""`plan.json`: written and read, and refused for what it is not of."""

import json

import pytest
from problems import make_machines, make_problem, posterior

from paceline.cli.overrides import apply_overrides
from paceline.comm import LocalGroup
from paceline.errors import SettingsError
from paceline.planner.plan_file import Plan, fingerprint
from paceline.planner.planning import make_plan, to_plan
from paceline.recipes.transformer_lm import run as make_run
from paceline.training.training import prepare

MODEL = {"name": "decoder", "num_layers": 4, "width": 128, "num_heads": 4, "vocabulary": 256}


@pytest.fixture(scope="module")
def run():
    return make_run()


@pytest.fixture(scope="module")
def plan(run):
    problem = make_problem(make_machines(num_ranks=2), model=MODEL, global_batch=run.global_batch)
    return to_plan(make_plan(problem, posterior()), "/some/where/mine.py:run", fingerprint(run))


def test_a_plan_is_the_same_after_it_was_written(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.predicted.step_s_low < plan.predicted.step_s < plan.predicted.step_s_high
    assert plan.num_workers <= plan.machines.num_ranks <= 2


def test_a_plan_is_of_its_recipe_wherever_that_lies_and_of_no_other_settings(plan, run):
    planned = apply_overrides(run, plan.list_pairs())
    plan.check(planned, "/elsewhere/mine.py:run")
    with pytest.raises(SettingsError, match=r"--plan must be of the recipe other.py:run, but it is of /some/where"):
        plan.check(planned, "other.py:run")
    for changed in ({"model.width": "96"}, {"global_batch": "7"}, {"optimizer": "sgd"}):
        with pytest.raises(SettingsError, match="--plan must be of the model that is trained, but model, data"):
            plan.check(apply_overrides(planned, list(changed.items())), "mine.py:run")
    plan.check(apply_overrides(planned, [("num_steps", "7"), ("data.path", "elsewhere")]), "mine.py:run")
    with pytest.raises(SettingsError, match=r"but it is of a model given by --model; run paceline plan mine.py:run"):
        plan.model_copy(update={"recipe": None}).check(planned, "mine.py:run")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "--plan must be a file that can be read"),
        ("{", "--plan must be JSON"),
        ('{"version": 2}', "--plan must be a file of `paceline plan`"),
        ("[]", "--plan must be a file of `paceline plan`"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, text, words):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        Plan.load(path)


def test_a_plan_is_plain_json_without_places_of_this_machine(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["version"] == 1
    assert set(document["why"]) == {"what_if", "neighbours", "ties", "better", "measured"}
    assert str(tmp_path) not in (tmp_path / "plan.json").read_text()


def test_a_worker_builds_its_whole_model_before_it_knows_how_many_there_are(run, plan):
    """A plan names its replicas; a worker that has the whole model builds it alone, and others may come and go."""
    given = {"layout.data": "2", "layout.sharded": "1", "model.width": "16", "data.max_bytes": "20000"}
    planned = apply_overrides(run, list(given.items()))
    splits = planned.open_data()
    module = planned.model.build(splits.train.spec)
    assert prepare(planned, module, splits, LocalGroup())[0] is module
