import multiprocessing

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from paceline.checkpoint import AsyncSaver, Checkpoint, CheckpointStore, SafetensorsReader
from paceline.errors import CheckpointError

WHOLE = {
    "rows": torch.arange(35.0).view(7, 5),  # uneven: 4 and 3
    "columns": torch.arange(24, dtype=torch.int64).view(4, 6),
    "one_row": torch.arange(3.0).view(1, 3),  # all on rank 0
    "replicated": torch.arange(6.0).bfloat16(),
    "plain": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
}
PLACEMENTS = {
    "rows": Shard(0),
    "columns": Shard(1),
    "one_row": Shard(0),
    "replicated": Replicate(),
    "empty": Shard(0),
}


def shard(tensors, mesh, placements):
    return {
        name: distribute_tensor(tensor, mesh, [placements[name]]) if name in placements else tensor.clone()
        for name, tensor in tensors.items()
    }


def zeros_like(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def full(tensors):
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def assert_whole(tensors):
    assert tensors.keys() == WHOLE.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, WHOLE[name]), name


def work(rank, directory, role, results):
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        results.put((rank, role(rank, directory, mesh)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_two(directory, role):
    """Run `role` in two processes and return what both return."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.checkpoint", "torch.distributed.tensor"])
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, directory, role, results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        answers = dict(results.get(timeout=30) for _ in processes)
        for process in processes:
            process.join(30)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
    (directory / "rendezvous").unlink()
    return [answers[rank] for rank in range(2)]


def save_sharded(rank, directory, mesh):
    tensors = shard(WHOLE, mesh, PLACEMENTS)
    with CheckpointStore(directory / "store") as store:
        saved = store.save(tensors, {"from": rank}, step=1, process_group=dist.group.WORLD)
        with AsyncSaver(store, process_group=dist.new_group(backend="gloo")) as saver:
            saver.start(tensors, {"from": rank}, step=2)
            for tensor in tensors.values():
                tensor.zero_()
            background = saver.wait()
    return saved.path.name, saved.num_bytes, background.path.name


def load_sharded(rank, directory, mesh):
    """Sharded in another way than when it was saved; by our own load, and by torch's."""
    other = {
        "rows": Shard(1),
        "columns": Replicate(),
        "one_row": Shard(1),
        "plain": Replicate(),
        "replicated": Shard(0),
    }
    (path,) = CheckpointStore(directory / "store").list_checkpoints()
    ours = zeros_like(shard(WHOLE, mesh, other))
    Checkpoint.open(path).load(ours)
    assert_whole(full(ours))
    theirs = zeros_like(shard(WHOLE, mesh, other))
    dcp_load(theirs, storage_reader=SafetensorsReader(path))
    assert_whole(full(theirs))
    return True


def save_where_rank_1_cannot(rank, directory, mesh):
    tensors = shard(WHOLE, mesh, PLACEMENTS)
    with CheckpointStore(directory / "store") as store:
        if rank == 1:
            tensors["rows"] = torch.complex(torch.ones(3), torch.ones(3)).to(torch.complex128)
        messages = []
        for place in (store, CheckpointStore(directory / "file")):
            try:
                place.save(tensors, {}, step=1, process_group=dist.group.WORLD)
            except CheckpointError as error:
                messages.append(str(error))
        try:
            store.save(shard(WHOLE, mesh, PLACEMENTS), {}, step=2 + rank)
        except CheckpointError as error:
            messages.append(str(error))
        dist.barrier()  # rank 0 holds the lock until here
    return messages


def test_two_ranks_save_and_one_process_loads(tmp_path):
    (name, num_bytes, background), other = run_two(tmp_path, save_sharded)
    assert other == (name, num_bytes, background)
    for step, path in enumerate((tmp_path / "store" / name, tmp_path / "store" / background), start=1):
        checkpoint = Checkpoint.open(path)
        checkpoint.verify()
        assert checkpoint.step == step
        assert checkpoint.num_bytes == num_bytes
        assert {file.name for file in path.glob("tensors-*")} == {
            "tensors-00000-00000.safetensors",
            "tensors-00001-00000.safetensors",
        }
        assert checkpoint.list_tensors() == {name: (tensor.shape, tensor.dtype) for name, tensor in WHOLE.items()}
        tensors = {name: torch.full_like(tensor, 9) for name, tensor in WHOLE.items()}
        checkpoint.load(tensors)
        assert_whole(tensors)
        assert checkpoint.read_document() == {"from": 0}
    stored = sum(tensor.numel() * tensor.element_size() for tensor in WHOLE.values())
    assert num_bytes < stored + 2500  # a replicated tensor is there once


def test_one_process_saves_and_two_ranks_load(tmp_path):
    with CheckpointStore(tmp_path / "store") as store:
        store.save(WHOLE, {}, step=1)
    assert run_two(tmp_path, load_sharded) == [True, True]


def test_failures_reach_every_rank_and_leave_nothing_behind(tmp_path):
    (tmp_path / "file").write_text("")
    first, second = run_two(tmp_path, save_where_rank_1_cannot)
    for messages in (first, second):
        refused, in_the_way = messages[:2]
        assert "rank 1, could not be written: tensor 'rows' must be dense" in refused
        assert "file could not be written: File exists" in in_the_way
    assert "tensor 'columns' must be saved whole, but got 12 of 24 elements; save from all ranks" in first[2]
    assert "must have one writer" in second[2]
    assert [path.name for path in (tmp_path / "store").iterdir()] == [".lock"]
