"""The tracker against torch's, and against sums made by hand."""

import weakref

import pytest
import torch
from memory_models import Pictures, compute_loss, make_transformer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.memory import StorageTracker, counting
from paceline.memory.absent_group import absent_world


def train_step(module, optimizer, loss):
    loss(module).backward()
    optimizer.step()
    optimizer.zero_grad()


def picture_loss(module):
    return module(torch.ones(2, 1, 8, 8)).square().sum()


@pytest.mark.parametrize(
    ("make", "loss", "optimizer"),
    [
        (make_transformer, compute_loss, lambda p: torch.optim.AdamW(p, fused=True)),
        (make_transformer, compute_loss, lambda p: torch.optim.AdamW(p, foreach=True)),
        (Pictures, picture_loss, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ],
    ids=["fused_adamw", "foreach_adamw", "pictures"],
)
def test_the_peak_is_what_torchs_tracker_finds(make, loss, optimizer):
    module = make()
    chosen = optimizer(module.parameters())
    with counting(module, chosen, "cpu") as tracker:
        for _ in range(2):
            train_step(module, chosen, loss)
    other = make()
    other_chosen = optimizer(other.parameters())
    theirs = MemTracker()
    theirs.track_external(other, other_chosen)
    with theirs:
        for _ in range(2):
            train_step(other, other_chosen, loss)
            theirs.reset_mod_stats()
    snapshot = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]
    assert tracker.peak_bytes == snapshot["Total"]


def test_views_cost_nothing_and_what_is_let_go_of_neither():
    with torch.no_grad(), StorageTracker("cpu") as tracker:
        kept = torch.ones(100)
        view = kept[10:20]
        assert tracker.now["temporary"] == 400
        gone = torch.ones(1000)
        del gone
        assert tracker.now["temporary"] == 400
        assert tracker.peak_bytes == 4400
        tracker.label("optimizer", [view])
        assert tracker.now == {**dict.fromkeys(tracker.now, 0), "optimizer": 400}
        tracker.reset_peak()
        assert tracker.peak_bytes == 400


def test_a_model_outlives_trackers_and_holds_none_of_them():
    model = torch.nn.Linear(4, 4)
    tracker = StorageTracker("cpu")
    with counting(model, torch.optim.SGD(model.parameters()), "cpu", tracker):
        model(torch.ones(2, 4)).sum().backward()
    gone = weakref.ref(tracker)
    del tracker
    assert gone() is None


def test_what_forward_makes_is_told_from_what_backward_makes():
    module = make_transformer()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    num_bytes = sum(p.nbytes for p in module.parameters())
    with counting(module, optimizer, "cpu") as tracker:
        loss = compute_loss(module)
        assert tracker.now["parameters"] == num_bytes
        assert tracker.now["activations"] > 0
        assert tracker.now["temporary"] == 0
        loss.backward()
        del loss
        assert tracker.now["gradients"] == num_bytes
        optimizer.step()
        assert 2 * num_bytes <= tracker.now["optimizer"] <= 2 * num_bytes + 4 * len(list(module.parameters()))
        optimizer.zero_grad()
        assert tracker.now["gradients"] == tracker.now["activations"] == 0


def test_views_of_what_was_there_before_are_nothing_new():
    file = torch.zeros(10**6)
    with torch.no_grad(), StorageTracker("cpu") as tracker:
        view = file[:10]
        view.add_(1)
        assert tracker.now["temporary"] == 0
        tracker.label("activations", [view], is_part=True)
        assert tracker.now["activations"] == 40


def test_storages_count_with_the_size_that_they_are_given():
    before = torch.ones(100)
    with torch.no_grad(), StorageTracker("cpu") as tracker:
        made = torch.ones(100)
        made.untyped_storage().resize_(0)
        assert tracker.now["temporary"] == 0
        made.untyped_storage().resize_(800)
        assert tracker.now["temporary"] == tracker.peak_bytes == 800
        before.untyped_storage().resize_(1000)  # as FSDP does with what it gathers into
        assert tracker.now["parameters"] == 1000
        del made, before
        assert not any(tracker.now.values())
    assert "resize_" not in vars(torch.UntypedStorage)


def test_sizes_on_gpus_are_those_of_torchs_allocator():
    with FakeTensorMode(), torch.no_grad(), StorageTracker("cuda") as tracker:
        made = [torch.empty(size, device="cuda") for size in (1, 128, 129)]
        assert tracker.now["temporary"] == 512 * 4
        made[0].untyped_storage().resize_(516)
        assert tracker.now["temporary"] == 512 * 5


def test_of_what_ranks_share_this_ranks_part_counts():
    with absent_world(0, 4):
        mesh = init_device_mesh("cpu", (4,))
        weight = distribute_tensor(torch.ones(40, 10), mesh, [Shard(0)])
        with torch.no_grad(), StorageTracker("cpu") as tracker:
            tracker.label("parameters", [weight])
            assert tracker.now["parameters"] == 400
            doubled = weight * 2
            assert tracker.now["temporary"] == 400
            assert doubled.full_tensor().shape == (40, 10)
            assert tracker.now["temporary"] == 400
