"""Problems of the planner that tests change one thing of."""

from functools import cache

from paceline.planner.candidate import Machines
from paceline.planner.pool import make_pool
from paceline.planner.problem import Limits, PlanProblem
from paceline.planner.space import make_space
from paceline.simulator.training.answers import find_posterior
from paceline.simulator.training.contract import read_row
from paceline.topology import Cluster

MODEL = {"name": "decoder", "num_layers": 8, "width": 2048, "num_heads": 16, "vocabulary": 32000}


def make_machines(name="dgx_a100", num_ranks=8, memory_bytes=None, price=None, **settings):
    return Machines(name, Cluster.model_validate({"name": name, **settings}), num_ranks, memory_bytes, price)


def make_problem(*machines, model=MODEL, tokens=1024, global_batch=32, num_steps=None, **limits):
    """Return a problem of a decoder on 8 devices, or on other machines."""
    fields = {"id": "plan", "num_ranks": 1, "model": model, "sample": {"tokens": tokens}, "attention": "fused"}
    row = read_row(fields, "row")
    return PlanProblem(row, global_batch, machines or (make_machines(),), ("bf16",), num_steps, Limits(**limits))


@cache
def posterior():
    return find_posterior(())


def price(problem):
    """Return the pool of a problem, and the candidate that needs least memory."""
    return make_pool(problem, posterior(), make_space(problem).candidates)
