"""What would let workers train apart, or only half go on, is refused at the first step."""

import random
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import paceline
from paceline.comm import LocalGroup
from paceline.data import DifferentStreamsWarning
from paceline.data.batch import list_tensors
from paceline.errors import GradientError, SettingsError
from paceline.replica import Replica
from paceline.sync import (
    ADPSGD,
    ASGD,
    DPSGD,
    EASGD,
    SSP,
    AdaptiveMixing,
    ChocoSGD,
    DiLoCo,
    EveryStep,
    LocalSGD,
    ParameterServer,
    PushSum,
)

RULES = [EveryStep(), LocalSGD(period=4), DiLoCo(period=4)]
NEIGHBOURS = [DPSGD(), PushSum(), ChocoSGD(), AdaptiveMixing()]
COPYING = [EASGD(period=4), EASGD(asynchronous=True), ASGD(), SSP(), ParameterServer(), ADPSGD()]


def make_dataset(num_samples=64):
    inputs = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def make_replica(group, sync, **settings):
    torch.manual_seed(group.rank)
    model = torch.nn.Linear(4, 1)
    return paceline.Replica(model, torch.optim.AdamW(model.parameters(), lr=0.1), group=group, sync=sync, **settings)


def step(replica, **settings):
    inputs, targets = make_dataset(8).tensors
    replica.backward(F.mse_loss(replica(inputs), targets), weight=8, **settings)
    return replica.update()


def run(work, size=2):
    return LocalGroup.run(size, work, timeout_s=20)


@pytest.mark.parametrize("sync", RULES + NEIGHBOURS, ids=lambda rule: rule.name)
def test_weights_that_one_rank_alone_has_loaded_are_refused(sync):
    def work(group):
        replica = make_replica(group, sync)
        if group.rank:
            torch.nn.init.ones_(replica.module.weight)
        with pytest.raises(
            SettingsError, match=r"begin with the same parameters, but the 2 ranks differ, first in .*weight"
        ):
            step(replica)

    run(work)


@pytest.mark.parametrize("sync", COPYING, ids=lambda rule: rule.name)
def test_weights_that_come_after_a_rule_has_copied_them_are_refused(sync):
    def work(group):
        replica = make_replica(group, sync)
        with replica.consensus():  # which changes nothing
            pass
        torch.nn.init.ones_(replica.module.weight)
        with pytest.raises(SettingsError, match=rf"since sync {sync.name} has copied them, but they changed; load"):
            step(replica)
        replica.close()

    run(work)


@pytest.mark.parametrize("num_steps", [None, 2])
def test_a_loop_over_epochs_around_a_loader_is_refused(num_steps):
    ending = {"num_epochs": 1} if num_steps is None else {"num_steps": num_steps}

    def work(group):
        with group:
            loader = paceline.Loader(make_dataset(), 16, **ending)
            state = loader.state_dict()
            for _ in loader:
                break  # it goes on from there
            assert len(list(loader)) == (4 if num_steps is None else num_steps) - 1
            with pytest.raises(SettingsError, match="leave the loop over epochs out and give num_epochs"):
                next(iter(loader))
            loader.load_state_dict(state)
            assert len(list(loader)) == (4 if num_steps is None else num_steps)

    run(work)


OPTIMIZERS = {
    "the optimizer": (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.RMSprop(p, lr=0.1)),
    "lr of parameter group 0": (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.2)),
    "betas of parameter group 0": (torch.optim.Adam, lambda p: torch.optim.Adam(p, betas=(0.8, 0.9))),
    "parameter group 0": (torch.optim.SGD, lambda p: torch.optim.SGD([{"params": [one]} for one in p])),
    "parameter group 1": (
        lambda p: torch.optim.SGD(p[:1]),
        lambda p: torch.optim.SGD([{"params": [one]} for one in p]),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sync", [EveryStep(), DiLoCo(period=4)], ids=lambda rule: rule.name)
def test_optimizers_that_differ_by_rank_are_told(name, sync):
    def work(group):
        module = torch.nn.Linear(3, 2)
        make = OPTIMIZERS[name][group.rank == 1]
        may_differ = isinstance(sync, DiLoCo) and " of " in name
        words = f"{name}.* must be the same on all ranks, but is .* on rank 1"
        with nullcontext() if may_differ else pytest.raises(SettingsError, match=words):
            Replica(module, make(list(module.parameters())), group=group, sync=sync)

    run(work)


SETTINGS = {
    "sync": (EveryStep(), DiLoCo(period=4)),
    "sync.period": (DiLoCo(period=4), DiLoCo(period=8)),
    "precision": ("fp32", "bf16"),
    "clip_norm": (None, 1.0),
    "ema": (0.9, 0.99),
    "hash_interval": (1, 0),
    "seed": (0, 1),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_differ_by_rank_are_told_when_the_replica_is_made(name):
    one, other = SETTINGS[name]
    values = (one.name, other.name) if name == "sync" else (one.period, other.period) if "." in name else (one, other)

    def work(group):
        settings = {"sync": EveryStep()} | {name.partition(".")[0]: other if group.rank == 2 else one}
        found = f"{values[0]!r} on rank 0, {values[0]!r} on rank 1, {values[1]!r} on rank 2"
        with pytest.raises(SettingsError, match=f"{name} must be the same on all ranks, but is {found}; give Replica"):
            make_replica(group, **settings)

    run(work, size=3)


def replace_weight(module):
    module.weight = torch.nn.Parameter(torch.ones(1, 4))


@pytest.mark.parametrize("change", [replace_weight, torch.nn.utils.parametrizations.weight_norm])
def test_parameters_that_are_replaced_later_are_refused_and_modules_around_them_are_not(change):
    def work(group):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
        step(replica)
        model[1] = torch.nn.Sequential(model[1])
        step(replica)
        change(model[0] if change is replace_weight else model[1][0])
        with pytest.raises(SettingsError, match=r"weight was replaced or removed since; change the model first"):
            step(replica)

    run(work)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("meddle", "change"),
    [
        (replace_weight, "weight was replaced"),
        (lambda module: module.weight.requires_grad_(False), "weight was frozen"),
        (torch.nn.utils.parametrizations.weight_norm, "weight was replaced"),
    ],
    ids=["replaced", "frozen", "parametrised"],
)
def test_parameters_that_are_replaced_or_frozen_after_the_replica_are_refused(size, meddle, change):
    def work(group):
        replica = make_replica(group, EveryStep())
        meddle(replica.module)
        with pytest.raises(
            SettingsError, match=f"that the Replica was made with, but {change}( or removed)? since; change the"
        ):
            step(replica)

    run(work, size)


def test_a_loss_without_gradients_is_refused():
    def work(group):
        replica = make_replica(group, EveryStep())
        with torch.no_grad():
            loss = replica(torch.ones(2, 4)).mean()
        with pytest.raises(GradientError, match="run forward without torch"):
            replica.backward(loss, weight=2)
        replica.close()

    run(work)


def test_neighbours_may_begin_apart_and_so_may_who_says_so():
    def work(group, sync):
        replica = make_replica(group, sync)
        torch.nn.init.constant_(replica.module.weight, group.rank)
        replica.begin_anew()
        step(replica)
        return float(replica.module.weight.detach().mean())

    first, second = run(lambda group: work(group, LocalSGD(period=4)))
    assert (first, second) == pytest.approx((0, 1), abs=0.11), "each goes on from its own, by a step of 0.1"
    assert run(lambda group: work(group, DPSGD())) == pytest.approx([0.5, 0.5], abs=0.11), "the neighbours' mean"


@pytest.mark.parametrize("missing", ["module", "optimizer"])
@pytest.mark.parametrize("sync", RULES, ids=lambda rule: rule.name)
def test_a_replica_state_without_module_or_optimizer_is_refused(sync, missing):
    def work(group):
        replica = make_replica(group, sync)
        for _ in range(3):
            step(replica)
        late = make_replica(group, sync)
        if missing != "module":
            late.module.load_state_dict(replica.module.state_dict())
        if missing != "optimizer":
            late.optimizer.load_state_dict(replica.optimizer.state_dict())
        late.load_state_dict(replica.state_dict())
        with pytest.raises(SettingsError, match=f"the {missing} must be as it was when the replica's state was saved"):
            step(late)

    run(work)


@pytest.mark.parametrize("name", ["seed", "global_batch", "dataset", "num_steps"])
def test_loaders_of_other_samples_are_refused(name):
    def work(group):
        settings = {"dataset": make_dataset(), "global_batch": 8, "seed": 0, "num_steps": 3}
        other = {"dataset": make_dataset(48), "global_batch": 16, "seed": 1, "num_steps": 4}
        settings |= {name: other[name]} if group.rank else {}
        loader = paceline.Loader(group=group, **settings)
        group.membership.loaders.add(loader)  # as it does by itself where processes have joined a group
        replica = make_replica(group, EveryStep())
        with pytest.raises(SettingsError, match="loaders must divide the same samples on all ranks"):
            step(replica)

    run(work)


class Table(Dataset):
    """A data set whose samples only its own code knows."""

    def __init__(self, inputs):
        self._inputs = inputs

    def __len__(self):
        return len(self._inputs)

    def __getitem__(self, index):
        return self._inputs[index], self._inputs[index].sum()


def begin(group, dataset, **settings):
    """Make a loader, as in processes that have joined the group, and take its first step."""
    loader = paceline.Loader(dataset, 8, group=group, num_steps=3, **settings)
    group.membership.loaders.add(loader)
    replica = make_replica(group, EveryStep())
    for batch in loader:
        (inputs,) = [tensor for tensor in list_tensors(batch.data) if tensor.shape[1:] == (4,)]
        replica.backward(replica(inputs).sum(), weight=batch.count())
        replica.update()
    return replica.num_updates


DATASETS = {
    "TensorDataset": lambda inputs: TensorDataset(inputs, inputs.sum(1)),
    "tensor": lambda inputs: inputs,
    "list": lambda inputs: [{"inputs": row, "number": number} for number, row in enumerate(inputs)],
    "split": lambda inputs: Subset(Table(torch.ones(64, 4)), inputs.argsort(0)[:, 0].tolist()),
}


@pytest.mark.parametrize("name", DATASETS)
def test_loaders_of_as_many_other_samples_are_refused(name):
    def work(group, seeds):
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(seeds[group.rank]))
        inputs += group.rank * 1e-7  # as two kinds of processors round
        begin(group, DATASETS[name](inputs))

    run(lambda group: work(group, (0, 0)))
    with pytest.raises(SettingsError, match=r"num_samples=64, .* holds others on rank 1 than on rank 0; seed random"):
        run(lambda group: work(group, (0, 1)))


def test_augmentation_of_its_own_is_no_other_data():
    def train(group, kind):
        return begin(group, kind(torch.randn(64, 4, generator=torch.Generator().manual_seed(group.rank))))

    assert run(lambda group: train(group, Table)) == [3, 3]
    with pytest.raises(SettingsError, match="holds others on rank 1 than on rank 0"):  # what lies in memory draws none
        run(lambda group: train(group, list))


class Rows(IterableDataset):
    """Rows of numbers from a first one on, in steps; or random ones."""

    def __init__(self, first, step, draw=None):
        self._numbers, self._draw = range(first, 100, step), draw

    def __iter__(self):
        for number in self._numbers:
            yield torch.full((4,), float(number)) + (self._draw() if self._draw else 0)


@pytest.mark.filterwarnings("ignore::paceline.data.randomness.SharedRandomNumbersWarning")
def test_a_stream_that_divides_itself_by_rank_is_warned_of():
    run(lambda group: begin(group, Rows(0, 1)))
    run(lambda group: begin(group, Rows(0, 1, random.random)))  # rightly other numbers on each
    with pytest.warns(DifferentStreamsWarning, match="first sample on rank 1 is not that of rank 0: a data set that"):
        run(lambda group: begin(group, Rows(group.rank, group.size)))


def train_normalised(group, num_samples, shape, *, scope="local", **settings):
    """Train a network with BatchNorm for a step, and return how many updates were made before an error."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Flatten(), torch.nn.LazyLinear(1))
    module(torch.ones(2, *shape))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    replica = paceline.Replica(module, optimizer, group=group, batch_norm=scope)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, *shape, generator=generator)
    loader = paceline.Loader(TensorDataset(inputs), 4 * group.size, group=group, num_epochs=1, **settings)
    group.membership.loaders.add(loader)
    other = paceline.Loader(TensorDataset(inputs[:1]), group.size, group=group)  # which another loop reads, to evaluate
    group.membership.loaders.add(other)
    for batch in loader:
        try:
            replica.backward(replica(batch.data[0]).square().mean(), weight=batch.count(), last=batch.last)
        except SettingsError as error:
            return replica.num_updates, str(error)
        if batch.last:
            replica.update()
    return replica.num_updates, ""


@pytest.mark.parametrize(
    ("num_samples", "shape", "settings", "is_refused"),
    [
        (34, (3,), {}, True),
        (35, (3,), {}, True),
        (36, (3,), {}, False),
        (33, (3,), {"drop_last": True}, False),
        (34, (3, 2), {}, False),
        (34, (3,), {"scope": "global"}, False),
        (33, (3,), {"scope": "global"}, True),
        (36, (3,), {"num_micro_batches": 2}, True),
    ],
    ids=str,
)
def test_a_tail_on_which_batch_norm_cannot_train_is_refused_before_the_first_step(
    num_samples, shape, settings, is_refused
):
    for num_updates, words in run(lambda group: train_normalised(group, num_samples, shape, **settings)):
        if is_refused:
            assert num_updates == 0
            assert "BatchNorm must see more than one value" in words
            assert f"has one sample ({num_samples} samples in global batches of 8); leave out" in words
        else:
            assert (num_updates > 3, words) == (True, "")


def test_a_worker_alone_is_told_of_its_tail_before_the_first_step_too():
    ((num_updates, words),) = run(lambda group: train_normalised(group, 13, (3,)), size=1)
    assert num_updates == 0
    assert "one sample (13 samples in global batches of 4)" in words


def test_the_code_after_the_loop_is_for_a_training_that_has_ended(tmp_path):
    ended = []

    def train():
        with paceline.join() as group:
            replica = make_replica(group, EveryStep())
            loader = paceline.Loader(make_dataset(), 8, num_steps=4)
            paceline.load_latest(tmp_path, replica, loader)
            for _ in loader:
                step(replica)
                if replica.num_updates == 2:
                    replica.membership.request_stop("a test")
                if replica.should_save(every=100):
                    paceline.save(tmp_path, replica, loader)
            ended.append(replica.num_updates)

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == 75
    assert ended == []
    train()
    assert ended == [4]


def test_an_optimizer_that_the_loop_steps_too_is_refused():
    def work(group):
        replica = make_replica(group, EveryStep())
        step(replica)
        inputs, targets = make_dataset(8).tensors
        replica.backward(F.mse_loss(replica(inputs), targets), weight=8)
        with pytest.raises(GradientError, match=r"optimizer.step\(\) must be left to replica.update"):
            replica.optimizer.step()
        replica.update()
        replica.close()
        replica.optimizer.step()

    run(work)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sync": "dilocco"}, "sync: .*did you mean 'diloco'"),
        ({"landing": "now"}, "landing must be one of update, arrival, next_forward, but got 'now'"),
        ({"batch_norm": "sync"}, "batch_norm must be one of local, global, but got 'sync'"),
        ({"precision": "fp8"}, "precision must be one of .*, but got 'fp8'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_words_that_mean_nothing_are_refused(settings, words):
    with pytest.raises(SettingsError, match=words):
        make_replica(LocalGroup(), **({"sync": EveryStep()} | settings))
    with pytest.raises(GradientError, match="reduction must be mean or sum, but got 'avg'"):
        step(make_replica(LocalGroup(), EveryStep()), reduction="avg")


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(SettingsError, match=r"must be a torch.optim.Optimizer of .*, but got None"):
        paceline.Replica(torch.nn.Linear(2, 2), None, group=LocalGroup())


def test_replicas_in_another_order_are_told_which_does_not_fit(tmp_path):
    def make(width):
        model = torch.nn.Linear(width, 1)
        return paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)

    with LocalGroup() as group:
        paceline.save(tmp_path, make(2), make(3))
    with LocalGroup() as group, pytest.raises(paceline.errors.CheckpointError) as refused:
        paceline.load_latest(tmp_path, make(3), make(2))
    assert refused.value.__notes__ == ["replica0 of 2, from 0; give load_latest the same order as save"]


def test_a_checkpoint_is_loaded_whole(tmp_path):
    def make():
        loader = paceline.Loader(make_dataset(), 8, num_steps=4, group=LocalGroup())
        return make_replica(LocalGroup(), EveryStep()), loader

    replica, loader = make()
    step(replica)
    paceline.save(tmp_path, replica, loader)
    replica.membership.leave()
    with pytest.raises(paceline.errors.CheckpointError, match="'0 Loader' was saved and not given"):
        paceline.load_latest(tmp_path, make()[0])
    with pytest.raises(paceline.errors.CheckpointError, match="1 replicas were saved, and 2 given"):
        paceline.load_latest(tmp_path, make()[0], make()[0])
    assert paceline.load_latest(tmp_path, *make())


@pytest.mark.parametrize(
    "settings", [{"prefetch": -1}, {"num_processes": -1}, {"global_batch": True}, {"seed": "a"}], ids=str
)
def test_numbers_of_a_loader_are_numbers(settings):
    with pytest.raises(SettingsError, match=r"must be a whole number.*, but got"):
        paceline.Loader(make_dataset(), **({"global_batch": 4, "group": LocalGroup()} | settings))


def test_a_collate_fn_is_a_function():
    with pytest.raises(SettingsError, match=r"collate_fn must be a function .*, but got 'x'; leave it out"):
        paceline.Loader(make_dataset(), 4, group=LocalGroup(), collate_fn="x")
