import json
import math

import pytest
import torch

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.checkpoint.comparison import compare_documents, compare_tensors


def make_state(step):
    tensors = {"model/same": torch.arange(6.0), "model/moved": torch.full((4,), 2.0), "model/cut": torch.zeros(3)}
    tensors["model/moved"][0] += 0.5 * step
    document = {"step": step, "run": {"lr": 0.1, "shares": [1, 2]}, "nan": float("nan")}
    if step == 2:
        tensors |= {"model/cut": torch.zeros(4), "model/new": torch.zeros(1)}
    return tensors, document


@pytest.fixture
def run(tmp_path):
    with CheckpointStore(tmp_path / "run" / "checkpoints", incremental=9) as store:
        for step in (1, 2, 3):
            store.save(*make_state(step), step, is_best=step == 1)
    return tmp_path / "run"


def test_they_are_listed_with_what_they_share(run, run_here):
    done = run_here("checkpoint", "list", run)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "3", "2", "1"]
    assert lines[3].endswith("step-00000001 (best)")
    rows = json.loads(run_here("checkpoint", "list", run / "checkpoints", "--json").stdout)
    assert [row["step"] for row in rows] == [3, 2, 1]
    assert [row["shared_bytes"] > 0 for row in rows] == [True, True, False]
    assert [row["num_tensors"] for row in rows] == [3, 4, 3]
    (run / "checkpoints" / "step-00000003" / "COMMITTED").unlink()
    rows = json.loads(run_here("checkpoint", "list", run, "--json").stdout)
    assert rows[0]["damage"] == "it was never finished"


def test_verify_names_what_is_damaged(run, run_here):
    done = run_here("checkpoint", "verify", run)
    assert done.returncode == 0
    assert done.stdout.count("whole") == 3
    (run / "checkpoints" / "step-00000002" / "state.json").write_text("{}")
    done = run_here("checkpoint", "verify", run)
    assert done.returncode == 1
    assert "step-00000002: state.json does not match its digest" in done.stdout
    assert done.stdout.count("whole") == 2
    rows = json.loads(run_here("checkpoint", "verify", run / "checkpoints" / "step-00000003", "--json").stdout)
    assert [row["damage"] for row in rows] == [None]


def test_diff_says_which_tensors_and_by_how_much(run, run_here):
    done = run_here("checkpoint", "diff", run, run, "--which", 1, "--other", 3, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    norm = (2.5**2 + 3 * 2**2) ** 0.5
    assert found["tensors"] == [
        {
            "name": "model/moved",
            "reason": "values",
            "num_elements": 1,
            "share": 0.25,
            "largest": 1.0,
            "relative": pytest.approx(1 / norm),
        }
    ]
    assert found["documents"] == [{"path": "step", "first": 1, "second": 3}]
    text = run_here("checkpoint", "diff", run, run, "--which", "1", "--other", "2").stdout
    assert "tensors: 3 of 4 differ" in text
    assert "model/new: only in the second" in text
    assert "model/cut: (3,) torch.float32 and (4,) torch.float32" in text
    assert "step: 1 and 2" in text


def test_equal_ones_are_the_same_however_they_are_cut(run, tmp_path, run_here):
    with CheckpointStore(tmp_path / "whole") as store:
        store.save(*make_state(3), 3)
    done = run_here("checkpoint", "diff", run, tmp_path / "whole")
    assert done.returncode == 0
    assert "They are the same." in done.stdout


@pytest.mark.parametrize(
    ("first", "second", "largest"),
    [
        (torch.tensor([2**53 + 1, 7]), torch.tensor([2**53, 7]), 1.0),
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), 2.0**64),
        (torch.tensor([2**63 + 1], dtype=torch.uint64), torch.tensor([1], dtype=torch.uint64), 2.0**63),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor(1.0).bfloat16(), torch.tensor(2.0).bfloat16(), 1.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 3j]), 2.0),
        (torch.tensor([0x7FC00000]).int().view(torch.float), torch.tensor([0x7FC00001]).int().view(torch.float), None),
    ],
    ids=["beyond float64", "farthest", "unsigned", "zeros", "scalar", "flag", "complex", "NaN"],
)
def test_a_bit_of_a_tensor_is_a_difference(tmp_path, first, second, largest):
    one, other = save_each(tmp_path, ({"t": first}, {}), ({"t": second}, {}))
    (found,) = compare_tensors(one, other)
    assert found.num_elements == 1
    assert math.isnan(found.largest) if largest is None else found.largest == largest
    assert list(compare_tensors(one, one)) == []


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"lr": None}, {}, ("lr (only in the first)", None, None)),
        ({"a": {}}, {"a": {"b": None}}, ("a.b (only in the second)", None, None)),
        ({"flag": True}, {"flag": 1}, ("flag", True, 1)),
        ({"flag": 1}, {"flag": 1.0}, ("flag", 1, 1.0)),
        ({"a": [0.0]}, {"a": [-0.0]}, ("a[0]", 0.0, -0.0)),
    ],
    ids=str,
)
def test_what_only_looks_equal_in_documents_differs(tmp_path, run_here, first, second, expected):
    one, other = save_each(tmp_path, ({}, first), ({}, second))
    (found,) = compare_documents(one.read_document(), other.read_document())
    assert repr(found) == repr(expected)
    done = run_here("checkpoint", "diff", one.path, other.path)
    assert done.returncode == 1
    assert expected[0] in done.stdout


def save_each(folder, *states):
    for number, state in enumerate(states):
        with CheckpointStore(folder / str(number)) as store:
            yield Checkpoint.open(store.save(*state, 1).path)


def test_where_there_is_none_says_so(tmp_path, run_here):
    done = run_here("checkpoint", "list", tmp_path)
    assert done.returncode == 2
    assert "must hold checkpoints, but there is none; check the path" in done.stderr


def test_documents_differ_by_paths():
    first = {"a": [1, {"b": 2}], "c": [1], "d": float("nan")}
    second = {"a": [1, {"b": 3}], "c": [1, 2], "d": float("nan"), "e": 0}
    assert list(compare_documents(first, second)) == [("a[1].b", 2, 3), ("c", [1], [1, 2]), ("e", None, 0)]
