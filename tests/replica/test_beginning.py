"""What would let workers train apart, or only half go on, is refused at the first step."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import LocalGroup
from paceline.errors import GradientError, SettingsError
from paceline.sync import DPSGD, DiLoCo, EveryStep, LocalSGD

RULES = [EveryStep(), LocalSGD(period=4), DiLoCo(period=4)]


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


@pytest.mark.parametrize("sync", RULES, ids=lambda rule: rule.name)
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


def test_neighbours_may_begin_apart_and_so_may_who_says_so():
    def work(group):
        for replica in (make_replica(group, DPSGD()), make_replica(group, LocalSGD(period=4))):
            torch.nn.init.constant_(replica.module.weight, group.rank)
            replica.begin_anew()
            step(replica)

    run(work)


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


@pytest.mark.parametrize("name", ["seed", "global_batch", "dataset"])
def test_loaders_of_other_samples_are_refused(name):
    def work(group):
        settings = {"dataset": make_dataset(), "global_batch": 8, "seed": 0}
        other = {"dataset": make_dataset(48), "global_batch": 16, "seed": 1}
        settings |= {name: other[name]} if group.rank else {}
        loader = paceline.Loader(num_steps=3, group=group, **settings)
        group.membership.loaders.add(loader)  # as it does by itself where processes have joined a group
        replica = make_replica(group, EveryStep())
        with pytest.raises(SettingsError, match="loaders must divide the same samples on all ranks"):
            step(replica)

    run(work)


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
