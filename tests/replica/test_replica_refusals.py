"""What a replica refuses, and what it survives."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm import LocalGroup
from paceline.errors import CommunicationError, DivergenceError, GradientError, NonFiniteError, SettingsError
from paceline.parallel.pipeline.absent import mark_missing
from paceline.replica import Loss, Replica
from paceline.replica.checks import check_optimizer
from paceline.sync import DPSGD, EveryStep, LocalSGD
from training_models import make_batch, make_module, make_replica, run_one_step


def test_update_and_backward_must_alternate():
    replica = make_replica(make_module())
    with pytest.raises(GradientError, match=r"backward\(last=True\) must come before"):
        replica.update()
    inputs, targets = make_batch()
    replica.backward(F.cross_entropy(replica(inputs), targets), weight=1.0)
    with pytest.raises(GradientError, match=r"update\(\) must be called"):
        replica.backward(F.cross_entropy(replica(inputs), targets), weight=1.0)


def test_weights_that_add_up_to_nothing_are_an_error():
    replica = make_replica(make_module())
    with pytest.raises(GradientError, match=r"more than 0, but at step 0 got 0\.0; see that some"):
        run_one_step(replica, weight=0.0)


def test_a_gradient_that_is_made_twice_is_an_error():
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            # Reentrant checkpointing runs a backward of its own for each segment.
            x = checkpoint(self.layer, x, use_reentrant=True)
            return checkpoint(self.layer, x, use_reentrant=True)

    def worker(group):
        replica = make_replica(Twice(), group)
        replica.backward(replica(torch.ones(2, 4, requires_grad=True)).sum(), weight=1.0)

    with pytest.raises((GradientError, CommunicationError), match="non-reentrant"):
        LocalGroup.run(2, worker)


def test_embeddings_that_change_in_forward_are_refused_where_ranks_must_stay_equal():
    words = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 5))

    def worker(group, sync):
        Replica(words, torch.optim.SGD(words.parameters(), 0.1), group=group, sync=sync).close()

    with pytest.raises((SettingsError, CommunicationError), match=r"but 0 has max_norm 1; shorten what is looked up"):
        LocalGroup.run(2, lambda group: worker(group, "every_step"))
    LocalGroup.run(1, lambda group: worker(group, "every_step"))
    LocalGroup.run(2, lambda group: worker(group, LocalSGD(period=2)))  # whose workers differ anyway


def test_sparse_gradients_are_refused_by_name():
    def worker(group):
        replica = make_replica(nn.Embedding(5, 3, sparse=True), group)
        replica.backward(replica(torch.tensor([1, 2])).sum(), weight=1.0)

    with pytest.raises((GradientError, CommunicationError), match="gradient of weight must be dense"):
        LocalGroup.run(2, worker)


def test_an_optimizer_of_another_module_is_refused():
    module = make_module()
    optimizer = torch.optim.SGD(make_module().parameters(), lr=0.1)
    with pytest.raises(SettingsError, match="must hold parameters of the module only"):
        Replica(module, optimizer)


def test_a_failed_backward_while_accumulating_leaves_no_weight():
    def worker(group, fail):
        replica = make_replica(make_module(), group)
        inputs, targets = make_batch()
        if fail:
            loss = F.cross_entropy(replica(inputs), targets)
            loss.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                replica.backward(loss, weight=12, last=False)
        result = run_one_step(replica)
        return result.weight, replica.module.block.weight.detach()

    plain, failed = (LocalGroup.run(2, lambda group, f=fail: worker(group, f))[0] for fail in (False, True))
    assert plain[0] == failed[0] == 24
    assert torch.equal(plain[1], failed[1])


def test_a_loss_of_no_weight_may_be_nan():
    def worker(group):
        replica = make_replica(make_module(), group, hash_interval=1)
        nothing = group.rank == 1
        for _ in range(2):
            result = run_one_step(replica, weight=0.0 if nothing else 12.0, scale=float("nan") if nothing else 1.0)
        return result.loss, result.weight

    losses = LocalGroup.run(2, worker)
    assert losses[0] == losses[1]
    assert losses[0][1] == 12
    assert math.isfinite(losses[0][0])


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_negative_or_not_finite_is_refused(weight):
    with pytest.raises(GradientError, match="weight must be a number of at least 0"):
        run_one_step(make_replica(make_module()), weight=weight)


def test_unfreezing_after_the_replica_was_made_is_refused_by_name():
    replica = make_replica(make_module())
    run_one_step(replica)
    replica.module.frozen.requires_grad_(True)
    with pytest.raises(GradientError, match=r"frozen\.weight must stay frozen"):
        run_one_step(replica)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "float32"}, "precision must be one of"),
        ({"clip_norm": -1.0}, "clip_norm must be more than 0"),
        ({"clip_norm": "1"}, "clip_norm must be more than 0, but got '1'"),
        ({"sync": "gossip"}, "sync must be a known name"),
        ({"hash_interval": -1}, "hash_interval must be a whole number of at least 0, but got -1; 0 compares nothing"),
        ({"hash_interval": 2.5}, "hash_interval must be a whole number of at least 0, but got 2.5"),
        ({"bucket_bytes": 0}, "bucket_bytes must be a whole number of at least 1, but got 0; leave it out"),
        ({"bucket_bytes": "small"}, "bucket_bytes must be a whole number of at least 1, but got 'small'"),
        ({"ema": "x"}, "ema must be a decay between 0 and 1, such as 0.999, but got 'x'"),
        ({"seed": "a"}, "seed must be a whole number, but got 'a'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_replica(make_module(), **options)


def test_a_loss_that_is_no_scalar_and_a_module_without_parameters_are_refused():
    replica = make_replica(make_module())
    with pytest.raises(GradientError, match="0-dim"):
        replica.backward(torch.ones(2, requires_grad=True), weight=1.0)
    module = make_module().requires_grad_(False)
    with pytest.raises(SettingsError, match="it has none"):
        Replica(module, torch.optim.SGD(module.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("loss", "weight", "words"),
    [
        (1.5, 1.0, "loss must be a 0-dim tensor, but got 1.5"),
        (Loss(None, 1.0), None, "loss must be a 0-dim tensor, but got None"),
        (torch.ones((), requires_grad=True), "8", "weight must be a number of at least 0, but got '8'; give batch.cou"),
    ],
    ids=["number", "none", "weight"],
)
def test_what_is_no_loss_or_weight_is_refused(loss, weight, words):
    with pytest.raises(GradientError, match=words):
        make_replica(make_module()).backward(loss, weight=weight)


def test_a_weight_may_be_a_tensor():
    replica = make_replica(make_module())
    replica.backward(F.cross_entropy(replica(make_batch()[0]), make_batch()[1]), weight=torch.tensor([1, 1]).sum())
    assert replica.update().weight == 2


def test_an_optimizer_that_computes_the_loss_itself_is_refused():
    module = make_module()
    with pytest.raises(SettingsError, match="must take its step from the gradients alone, but LBFGS computes the loss"):
        Replica(module, torch.optim.LBFGS(module.parameters()), group=LocalGroup())


def test_an_optimizer_belongs_to_one_open_replica():
    module = make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    first = Replica(module, optimizer)
    with pytest.raises(SettingsError, match=r"this one belongs to another that is open; call close\(\)"):
        Replica(module, optimizer)
    first.close()
    run_one_step(Replica(module, optimizer))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("codec", ["none", "top_k"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_step_that_is_not_finite_is_dropped_and_the_next_can_be_made(num_workers, codec, clip_norm):
    """On all workers alike, with the result of a loop that never saw that batch."""

    torch.manual_seed(0)  # here, since workers are threads, which share torch's generator
    built = torch.nn.Sequential(torch.nn.Linear(6, 200), torch.nn.Tanh(), torch.nn.Linear(200, 3))

    def train(group, scales):
        module = copy.deepcopy(built)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        sync = EveryStep(codec={"name": "top_k", "density": 0.3, "dense_below": 0} if codec == "top_k" else "none")
        replica = Replica(module, optimizer, group=group, sync=sync, clip_norm=clip_norm, bucket_bytes=1000)
        for step, scale in scales.items():
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + group.rank))
            replica.backward(replica(inputs).square().mean() * (scale if group.rank == 0 else 1.0), weight=4.0)
            if scale == 1.0:
                replica.update()
            else:
                with pytest.raises(NonFiniteError):
                    replica.update()
        replica.close()
        return torch.nn.utils.parameters_to_vector(module.parameters()).detach()

    good = {0: 1.0, 1: 1.0, 3: 1.0, 5: 1.0}
    stained = good | {2: float("nan"), 4: float("inf")}
    expected = LocalGroup.run(num_workers, lambda group: train(group, good), timeout_s=20)
    for found in LocalGroup.run(num_workers, lambda group: train(group, dict(sorted(stained.items()))), timeout_s=20):
        assert torch.equal(found, expected[0])


@pytest.mark.parametrize(
    ("sync", "kind", "words"),
    [
        (EveryStep(program="ring"), DivergenceError, r"look for the program 'ring', code that changes it on one rank"),
        (DPSGD(), NonFiniteError, "the loss must be finite"),
    ],
)
def test_a_backward_after_a_failed_update_is_refused_for_its_true_reason(sync, kind, words):
    def work(group):
        model = nn.Linear(2, 1)
        replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group, sync=sync, hash_interval=1)
        replica.backward(replica(torch.ones(1, 2)).sum(), weight=1)
        replica.update()
        with torch.no_grad():
            model.bias.add_(group.rank if kind is DivergenceError else 0.0)
        factor = float("nan") if kind is NonFiniteError else 1.0
        replica.backward(replica(torch.ones(1, 2)).sum() * factor, weight=1)
        with pytest.raises(kind, match=words):
            replica.update()
        is_own = "of a rule that lets workers differ, or in a layout, " if kind is NonFiniteError else ""
        told = f"must not follow an update that failed, but the last one raised {kind.__name__} {is_own}after which"
        with pytest.raises(GradientError, match=told):
            replica.backward(replica(torch.ones(1, 2)).sum(), weight=1)

    LocalGroup.run(2, work)


def test_parameters_of_other_stages_leave_their_groups():
    module, elsewhere = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    mark_missing(elsewhere, "head.bias, which only another stage has")
    optimizer = torch.optim.SGD([{"params": [elsewhere]}, {"params": [module.weight]}], lr=0.1)
    check_optimizer(optimizer, module)
    assert [group["params"] for group in optimizer.param_groups] == [[], [module.weight]]
