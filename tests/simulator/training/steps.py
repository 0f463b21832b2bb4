"""Rows of steps that tests change one field of."""

from paceline.simulator.training import answer_rows, describe, make_case, read_rows
from paceline.simulator.training.batch import make_batch
from paceline.simulator.training.calibration import load_posterior
from paceline.simulator.training.likeness import Features

ROW = {
    "id": "r1",
    "model": {
        "name": "decoder",
        "num_layers": 8,
        "width": 1024,
        "num_heads": 8,
        "num_kv_heads": 8,
        "feedforward": 4096,
        "is_gated": False,
        "vocabulary": 32000,
        "is_tied": True,
        "positions": "learned",
    },
    "sample": {"tokens": 1024},
    "device": "a100_80gb",
    "cluster": {"name": "dgx_a100"},
    "num_ranks": 1,
    "devices_per_host": 8,
    "layout": {"data": 1, "sharded": 1, "zero_stage": 3, "context": 1, "tensor": 1, "pipeline": 1},
    "sequence_parallel": False,
    "pipeline": {"order": "1f1b", "stages_per_rank": 1},
    "micro_batch": 4,
    "global_batch": 32,
    "precision": "bf16",
    "attention": "eager",
    "recompute": "none",
    "is_compiled": False,
    "optimizer": "adamw",
    "stack": None,
}


def change(layout=(), **fields):
    """Return the row with other axes, whose product is the number of ranks, and other fields."""
    axes = {**ROW["layout"], **dict(layout)}
    ranks = axes["data"] * axes["sharded"] * axes["context"] * axes["tensor"] * axes["pipeline"]
    return {**ROW, "layout": axes, "num_ranks": ranks, **fields}


def read(*rows):
    return read_rows({"version": 1, "rows": list(rows)}, "rows", measured=False)


def answer(row, measured=()):
    """Return the answer to one row."""
    given = read_rows({"version": 1, "rows": list(measured)}, "measured rows", measured=True)
    return answer_rows(read(row), given)["rows"][0]


def step_times(*rows):
    """Return the seconds of a step of each row."""
    descriptions = [describe_row(row) for row in rows]
    return load_posterior().estimate(make_batch(descriptions), Features(descriptions)).sum(axis=1).tolist()


def describe_row(row):
    return describe(make_case(read(row)[0]))
