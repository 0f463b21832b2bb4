"""Ranks that share a model write their own slices: the checkpoint is as one process would have written it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.errors import StorageError
from paceline.memory import StorageTracker
from paceline.memory.absent_group import absent_world
from paceline.parallel.local import local
from paceline.replica import hashing, shared_saving
from paceline.replica.gathering import Slice
from paceline.replica.state import capture
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout

WIDTH = 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.gated = nn.Linear(WIDTH, 2 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 7)  # uneven
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        gate, value = self.gated(x).chunk(2, -1)
        return self.head(self.norm(self.project(gate.sigmoid() * value)))


def take_step(replica: paceline.Replica, step: int) -> float:
    torch.manual_seed(step)
    samples = torch.randn(8, WIDTH)[replica.shard.data_parallel_group.rank :: replica.shard.data_parallel_group.size]
    replica.backward(replica(samples).square().mean(), weight=len(samples))
    return replica.update().loss


def make_replica(layout: dict[str, Any]) -> paceline.Replica:
    torch.manual_seed(1)
    plan = {f"layers.{i}": "columns" if i % 2 == 0 else "rows" for i in range(6)}
    plan |= {"gated": "columns:2", "project": "rows"}
    settings = {"tensor_plan": plan, "sample": torch.ones(1, WIDTH)} if layout.get("tensor", 1) > 1 else {}
    module = paceline.parallelize(Net(), Layout(**layout), **settings)
    return paceline.Replica(module, torch.optim.AdamW(module.parameters(), lr=1e-2))


def save_and_go_on(folder: str, layout: dict[str, Any], seen: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    if not seen:
        shared_saving._is_seen_by_all = lambda directory, world: False
    with paceline.join() as group:
        replica = make_replica(layout)
        take_step(replica, 0)
        with StorageTracker("cpu") as tracker:
            paceline.save(f"{folder}/saved", replica)
            peak = tracker.peak_bytes
        expected = {name: tensor.clone() for name, tensor in capture(replica)[0].items()}
        straight = [take_step(replica, step) for step in (1, 2)]
        paceline.save(f"{folder}/saved", replica)
        own = sum(local(p).nbytes for p in replica.module.parameters())
        replica.close()
        again = make_replica(layout)
        assert paceline.load_latest(f"{folder}/saved", again)
        straight += [take_step(again, 3)]
        again.close()
        other = make_replica({"data": group.size})
        store = CheckpointStore(Path(folder) / "saved")
        first = Checkpoint.open(store.list_checkpoints()[-1])
        differing = [name for name, tensor in expected.items() if not torch.equal(first.read(name), tensor)]
        if group.rank == 0 and (missing := set(first.list_tensors()) ^ set(expected)):
            differing += [name for name in missing if "/random/" not in name]
        first.verify()
        other.close()
        files = sorted(path.name[:13] for path in first.path.glob("tensors-*"))
    return {"losses": straight, "differing": differing, "peak": peak, "own": own, "files": files}


LAYOUTS = [
    ({"sharded": 2}, True),
    ({"tensor": 2}, True),
    ({"sharded": 2, "zero_stage": 1}, True),
    ({"sharded": 2}, False),
]


@pytest.mark.parametrize(("layout", "seen"), LAYOUTS)
def test_each_rank_writes_its_slices_and_the_checkpoint_is_whole(
    tmp_path: Path, layout: dict[str, Any], seen: bool
) -> None:
    results = run_processes(2, save_and_go_on, {"folder": str(tmp_path), "layout": layout, "seen": seen})
    for result in results:
        assert result.exit_code == 0, result.output
        assert result.value["differing"] == []
        assert result.value["losses"] == results[0].value["losses"]
        assert len(set(result.value["files"])) == (2 if seen else 1)
    if seen and layout.get("zero_stage") != 1:
        for result in results:  # a copy of parameters and of both moments
            assert result.value["peak"] <= 3 * result.value["own"] + 4 * WIDTH * WIDTH + 40_000


def fail_on_one(folder: str) -> str:
    """Return what a save ends with on each rank when one cannot write."""
    with paceline.join() as group:
        replica = make_replica({"sharded": 2})
        take_step(replica, 0)
        paceline.save(f"{folder}/saved", replica)
        take_step(replica, 1)
        from paceline.checkpoint import store

        def refuse(*_: Any, **__: Any) -> Any:
            raise OSError(28, "No space left on device")

        if group.rank == 1:
            next(iter(replica.membership.savers.values())).saver.wait()
            store.write_blocks = refuse
        paceline.save(f"{folder}/saved", replica)
        with pytest.raises(StorageError, match=r"rank 1, could not be written: No space left on device") as error:
            next(iter(replica.membership.savers.values())).saver.wait()
        left = [path.name for path in CheckpointStore(Path(folder) / "saved").list_checkpoints()]
        assert left == ["step-00000001"], left
        group.barrier(name="looked")
    return str(error.value)


def test_a_failure_of_one_is_an_error_of_all_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    results = run_processes(2, fail_on_one, {"folder": str(tmp_path)})
    check_exits(results)
    assert results[0].value == results[1].value


def test_a_slice_knows_where_it_begins() -> None:
    block = torch.arange(6).view(2, 3)
    [(part, begin)] = Slice("float32", [2, 3], [6, 5], begin=2 * 5 + 2).split(block)
    assert part is block
    assert begin == (2, 2)
    assert Slice("float32", [], []).split(torch.tensor(1.0))[0][1] == ()


def test_a_slice_of_joined_matrices_is_split_into_one_of_each() -> None:
    whole = torch.arange(12 * 5).view(12, 5)
    held = Slice("int64", [6, 5], [12, 5], begin=2 * 5, dim=0, num_parts=3)  # of 3 matrices of 4 rows
    block = held.cut(whole).flatten(0, 1)
    parts = held.split(block)
    assert [begin for _, begin in parts] == [(2, 0), (6, 0), (10, 0)]
    for part, begin in parts:
        assert torch.equal(part, whole[begin[0] : begin[0] + 2])


@pytest.mark.parametrize(
    ("layout", "num_hashed"), [({"sharded": 2}, 0), ({"sharded": 2, "data": 2}, 1), ({"data": 2}, 1)]
)
def test_what_no_other_rank_holds_is_not_hashed_before_a_save(
    monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], num_hashed: int
) -> None:
    hashed: list[int] = []
    monkeypatch.setattr(hashing, "hash_tensor", lambda tensor: hashed.append(tensor.numel()) or 0)
    with absent_world(0, layout.get("sharded", 1) * layout.get("data", 1)) as group:
        module = paceline.parallelize(nn.Linear(8, 16), Layout(**layout), group=group)
        replica = paceline.Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group)
        hashed.clear()
        replica.compare()
        assert hashed.count(local(module.weight).numel()) == num_hashed
        replica.close()


def save_what_changes(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    with paceline.join() as group:
        torch.manual_seed(1)
        net = Net()
        net.layers.requires_grad_(False)
        module = paceline.parallelize(net, Layout(sharded=2))
        replica = paceline.Replica(module, torch.optim.AdamW([p for p in module.parameters() if p.requires_grad]))
        for step in range(3):
            take_step(replica, step)
            paceline.save(f"{folder}/saved", replica, incremental=9)
        expected = {name: tensor.clone() for name, tensor in capture(replica)[0].items()}
        replica.close()
        group.barrier()
        newest = Checkpoint.open(CheckpointStore(Path(folder) / "saved").list_checkpoints()[0])
        newest.verify()
        differing = [name for name, tensor in expected.items() if not torch.equal(newest.read(name), tensor)]
    return {"differing": differing, "shared": newest.shared_bytes, "files": len(list(newest.path.glob("shared-*")))}


def test_ranks_share_what_has_not_changed_with_the_checkpoint_before(tmp_path: Path) -> None:
    frozen = 6 * (WIDTH * WIDTH + WIDTH) * 4
    for result in run_processes(2, save_what_changes, {"folder": str(tmp_path)}):
        assert result.exit_code == 0, result.output
        assert result.value["differing"] == []
        assert result.value["files"] == 2, "one of each rank"
        assert result.value["shared"] >= frozen
