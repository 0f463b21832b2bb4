"""Candidates: training refuses none of them, and the planner sees them as the contract does."""

import random
from dataclasses import replace

import pytest
from problems import make_machines, make_problem, price

from paceline.cli.overrides import apply_overrides
from paceline.errors import PacelineError
from paceline.planner.candidate import Candidate, Division
from paceline.planner.plan_file import to_text
from paceline.planner.space import Legality, make_space
from paceline.recipes.transformer_lm import run as make_run
from paceline.simulator.training import answer_rows
from paceline.training.rehearsal import check_workers

SIZES = {"num_layers": 6, "width": 48, "num_heads": 6}
"""Sizes that tensor ranks and stages do not always divide."""


@pytest.fixture(scope="module")
def run():
    changes = {"model.num_layers": 6, "model.width": 48, "model.num_heads": 6, "data.sequence_length": 64}
    return apply_overrides(
        make_run(), [*((name, str(value)) for name, value in changes.items()), ("global_batch", "24")]
    )


@pytest.fixture(scope="module")
def problem():
    model = {"name": "decoder", **SIZES, "vocabulary": 256, "feedforward": 192}
    return make_problem(make_machines(num_ranks=24, devices_per_host=12), model=model, tokens=4096, global_batch=24)


def ask_training(run, splits, candidate):
    """Return what training says of a candidate; empty if nothing."""
    try:
        planned = apply_overrides(run, [(name, to_text(value)) for name, value in candidate.list_overrides().items()])
        check_workers(planned, candidate.division.num_workers, splits)
    except PacelineError as error:
        return " ".join(str(error).split())
    return ""


def test_training_refuses_no_candidate(run, problem):
    space, splits = make_space(problem), run.open_data()
    assert space.num_refused > 100
    chosen = {(one.division, one.num_micro_batches): one for one in space.candidates}
    assert len({division for division, _ in chosen}) > 100
    assert {axis for division, _ in chosen for axis in division.axes} == {
        "data", "sharded", "context", "tensor", "pipeline"
    }  # fmt: skip
    for candidate in random.Random(0).sample(list(chosen.values()), 150):
        assert ask_training(run, splits, candidate) == ""


def test_a_model_without_blocks_is_not_recomputed(problem):
    assert {one.recompute for one in make_space(problem).candidates} == {"none", "selective", "full"}
    plain = replace(problem, has_blocks=False)
    assert {one.recompute for one in make_space(plain).candidates} == {"none"}
    said = Legality(plain).find_refusal(Candidate(0, Division(), 1, "full", "fp32"))
    assert said == "memory.recompute must be none for a model without blocks, but got full"


@pytest.mark.parametrize(
    ("division", "many", "reason"),
    [
        (Division(tensor=4, data=2), 1, "num_heads must be a multiple of tensor(4)"),
        (Division(pipeline=8), 1, "each stage must have a layer of the model"),
        (Division(pipeline=2, sharded=2, order="zero_bubble"), 4, "must not split backward with zero_stage 3"),
        (Division(data=32), 1, "global_batch must be at least the number of workers"),
        (Division(data=2), 13, "at most a worker's 12 samples"),
        (Division(pipeline=2), 5, "micro-batches of a pipeline must be equal"),
        (Division(context=3), 1, "must be a multiple of 6 tokens"),
    ],
)
def test_what_training_refuses_is_refused_with_its_words(problem, division, many, reason):
    assert reason in Legality(problem).find_refusal(Candidate(0, division, many, "none", "bf16"))


def test_images_and_models_without_heads_have_no_tensor_or_context_axis():
    model = {"name": "resnet", "depth": 18}
    space = make_space(make_problem(model=model, tokens=None, global_batch=64))
    assert {axis for one in space.candidates for axis in one.division.axes} == {"data", "sharded", "pipeline"}
    legality = Legality(make_problem(model=model, tokens=None, global_batch=64))
    refusals = [legality.find_refusal(Candidate(0, Division(**{axis: 2}), 1, "none", "bf16")) for axis in AXES]
    assert "must have matrices that ranks can share for tensor(2)" in refusals[0]
    assert "samples must be sequences for context(2)" in refusals[1]


AXES = ("tensor", "context")


def test_a_candidate_has_the_price_of_its_row_in_the_contract():
    problem = make_problem(global_batch=44)  # which workers share unevenly
    pool, _ = price(problem)
    known = [index for index, one in enumerate(pool.needs) if problem.has_row(one.candidate)]
    chosen = random.Random(1).sample(known, 40)
    answers = answer_rows([problem.row_of(pool.needs[index].candidate) for index in chosen])["rows"]
    objectives = pool.objectives()
    for index, answer in zip(chosen, answers, strict=True):
        assert answer["error"] is None
        assert objectives[index, [0, 2, 3]].tolist() == pytest.approx(
            [answer["step_s"], answer["energy_j"], answer["memory_bytes"]], rel=1e-9
        )


def test_fewer_ranks_are_considered_while_there_are_few_candidates():
    problem = make_problem(make_machines(num_ranks=32))
    whole = make_space(problem)
    assert {one.division.num_ranks for one in whole.candidates} == {1, 2, 4, 8, 16, 32}
    assert whole.left_out == ""
    few = make_space(problem, most=100)
    assert {one.division.num_ranks for one in few.candidates} == {32}
    assert few.left_out == "1, 2, 4, 8, 16 ranks of dgx_a100"


def test_overrides_are_only_those_of_axes_that_there_are():
    plain = Candidate(0, Division(data=4), 2, "none", "fp32").list_overrides()
    assert plain["layout.data"] == 4
    assert plain["num_micro_batches"] == 2
    assert not any(name.startswith("pipeline.") or name == "layout.zero_stage" for name in plain)
    piped = Candidate(0, Division(pipeline=2, sharded=2, order="interleaved", stages_per_rank=2), 4, "full", "bf16")
    assert piped.list_overrides() | {"num_micro_batches": 1, "pipeline.num_micro_batches": 4} == piped.list_overrides()
