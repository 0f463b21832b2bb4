"""What a checkpoint is made of: several replicas, objects beside them, and what is refused or lost with words."""


import pytest
import torch
from torch import nn

from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.compression.codec import FeedbackDroppedWarning
from paceline.errors import CheckpointError, DivergenceError
from paceline.replica import Replica
from paceline.replica.state import FORMAT, capture, restore
from paceline.sync import ASGD, DPSGD, DiLoCo, EveryStep, LocalSGD, ParameterServer

TOP_K = {"name": "top_k", "density": 0.2, "dense_below": 0}


def make_replica(group, rule="every_step", make=lambda: nn.Linear(12, 10), learning_rate=0.01):
    module = make()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return Replica(module, torch.optim.AdamW(module.parameters(), lr=learning_rate), group=group, sync=rule)


def take_step(replica, step):
    generator = torch.Generator().manual_seed(100 * step + replica.group.rank)
    width = next(replica.module.parameters()).shape[1]
    replica.backward(replica(torch.randn(6, width, generator=generator)).square().mean())
    replica.update()


def newest(store, group):
    return store.find_newest_valid(lambda path, reason: pytest.fail(reason)) if group.rank == 0 else None


def save(store, group, tensors, document, step=1):
    if group.rank == 0:
        store.save(tensors, document, step)
    group.barrier()


def state_of(replica):
    tensors = {name: tensor.clone() for name, tensor in replica.module.state_dict().items()}
    for name, parameter in replica.module.named_parameters():
        tensors |= {f"{key} of {name}": t.clone() for key, t in replica.optimizer.state.get(parameter, {}).items()}
    return tensors | {name: tensor.clone() for name, tensor in replica.feedback().items()}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("said", [None, FORMAT + 1])
def test_a_checkpoint_of_another_format_is_refused_with_what_to_do(tmp_path, said):
    """Format 1 said nothing of itself: ``replicas`` by rank, and ``own<rank>/`` among the tensors."""

    def work(group):
        replica = make_replica(group)
        tensors, document = capture(replica)
        old = {"optimizer": {"type": "AdamW", "scalars": {}}, "replicas": [replica.state_dict()], "num_workers": 2}
        with CheckpointStore(tmp_path) as store:
            save(store, group, tensors, old if said is None else document | {"format": said})
            message = rf"must be of format {FORMAT}, but \S+ is of format {said or 1}; go on from it with the version"
            with pytest.raises(CheckpointError, match=message):
                restore(newest(store, group), replica)
        replica.close()

    LocalGroup.run(2, work)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Linear(12, 9),
            r"weight is of shape \(10, 12\) and float32 in it and of shape \(9, 12\) and float32",
        ),
        (lambda: nn.Linear(12, 10).double(), r"weight is of shape \(10, 12\) and float32 in it and .* float64 here"),
        (lambda: nn.Linear(12, 10, bias=False), r"bias is of shape \(10,\) and float32 in it and missing here"),
        (lambda: nn.Sequential(nn.Linear(12, 10)), r"0\.weight is missing in it and of shape \(10, 12\)"),
    ],
)
def test_another_model_is_refused_on_every_rank(tmp_path, make, message):
    def work(group):
        with CheckpointStore(tmp_path) as store:
            replica = make_replica(group)
            save(store, group, *capture(replica))
            other = make_replica(group, make=make)
            with pytest.raises(CheckpointError, match=message):
                restore(newest(store, group), other)
        replica.close()
        other.close()

    LocalGroup.run(2, work)


def test_replicas_that_differ_are_not_captured():
    def work(group):
        replica = make_replica(group)
        if group.rank == 1:
            with torch.no_grad():
                replica.module.bias[0] += 1
        capture(replica)

    with pytest.raises(DivergenceError, match="at step 0 the 2 ranks differ, first in parameter bias"):
        LocalGroup.run(2, work)


LOST = [
    (LocalSGD(period=2, codec=TOP_K), LocalSGD(period=2, codec=TOP_K), 1, "codec of sync 'local_sgd' had held back"),
    (
        EveryStep(codec=TOP_K),
        EveryStep(codec="int8"),
        2,
        "codec 'top_k' of 2 workers .* codec 'int8' runs among 2 here",
    ),
    (EveryStep(codec=TOP_K), EveryStep(codec=TOP_K), 1, "codec 'top_k' of 2 workers .* no codec runs among 1 here"),
    (EveryStep(codec=TOP_K), DiLoCo(period=2), 2, "codec 'top_k' of 2 workers .* no codec runs among 2 here"),
    (
        DiLoCo(period=2, synchronous_steps=0, codec=TOP_K),
        EveryStep(),
        2,
        "codec of sync 'diloco' had held back is dropped",
    ),
    (
        DiLoCo(period=2, synchronous_steps=0, codec=TOP_K),
        LocalSGD(),
        2,
        "codec of sync 'diloco' had held back is dropped",
    ),
    (
        ParameterServer(host_size=2, codec=TOP_K),
        ParameterServer(host_size=2, codec=TOP_K),
        4,
        "of 2 workers had held back is dropped, since 2 push to 1 servers",
    ),
    (
        ASGD(codec=TOP_K),
        ASGD(codec=TOP_K),
        3,
        "pushes of 2 workers had held back is dropped, since 3 push to 1 servers here",
    ),
    (
        ASGD(codec=TOP_K),
        ASGD(codec=TOP_K, num_servers=2),
        2,
        "of 2 workers had held back is dropped, since 2 push to 2 servers",
    ),
]


@pytest.mark.parametrize(("before", "after", "num_after", "message"), LOST)
def test_what_codecs_held_back_is_never_dropped_in_silence(tmp_path, before, after, num_after, message):
    def begin(group):
        replica = make_replica(group, before)
        for step in range(4):
            take_step(replica, step)
        with CheckpointStore(tmp_path) as store:
            save(store, group, *capture(replica))
        replica.close()

    def go_on(group):
        replica = make_replica(group, after)
        with CheckpointStore(tmp_path) as store:
            restore(newest(store, group), replica)
        group.barrier()
        replica.close()

    LocalGroup.run(2, begin)
    with pytest.warns(FeedbackDroppedWarning, match=message) as told:
        LocalGroup.run(num_after, go_on)
    assert len(told) == 1, "rank 0 tells it once"


def test_a_rule_begins_anew_from_the_mean_of_the_optimizers(tmp_path):
    def begin(group):
        replica = make_replica(group, DPSGD())
        for step in range(3):
            take_step(replica, step)
        own = state_of(replica)
        with CheckpointStore(tmp_path) as store:
            save(store, group, *capture(replica))
        replica.close()
        return own

    def go_on(group):
        replica = make_replica(group)
        with CheckpointStore(tmp_path) as store:
            restore(newest(store, group), replica)
        replica.close()
        return state_of(replica)

    saved = LocalGroup.run(3, begin)
    for loaded in LocalGroup.run(2, go_on):
        for name, tensor in loaded.items():
            mean = torch.stack([state[name].double() for state in saved]).mean(0)
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)
        assert not torch.equal(saved[0]["exp_avg of bias"], loaded["exp_avg of bias"])
