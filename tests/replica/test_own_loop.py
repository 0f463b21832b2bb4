"""A loop of one's own: killed and resumed it is the same loop, and what would go wrong silently is refused."""

import copy
import gc
import os
import re
import signal
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.comm import LocalGroup
from paceline.errors import CheckpointError, DataError, GradientError, SettingsError
from paceline.replica.worker_state import IdleRuleWarning
from paceline.sync import DiLoCo, EveryStep, LocalSGD, PostLocalSGD
from paceline.testing.processes import run_processes
from paceline.testing.rule_contract import every_rule

SYNCHRONOUS = {name: rule for name, rule in every_rule().items() if not rule.is_asynchronous}
CODED = {
    f"{name} with {codec}": type(rule)(**{**dict(rule), "codec": codec})
    for name, rule in {"every_step": EveryStep(), "local_sgd": LocalSGD(period=3), "diloco": DiLoCo(period=3)}.items()
    for codec in ("top_k", "int8")
}


class Words(torch.utils.data.Dataset):
    """Samples of several lengths, as mappings."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        tokens = torch.arange(index % 5 + 2) + index
        return {"tokens": tokens % 11, "labels": tokens * 3 % 11}


def collate(samples):
    def pad(key, value):
        return nn.utils.rnn.pad_sequence([one[key] for one in samples], batch_first=True, padding_value=value)

    return {"tokens": pad("tokens", 0), "labels": pad("labels", -100)}


class Tagger(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)))


def train(group, folder, *, sync="every_step", stop_at=None, every=4, num_epochs=2, seed=0):
    """The loop of the README; it dies without a word after `stop_at` updates."""
    with group:
        generator = torch.Generator().manual_seed(seed)
        model = Tagger()
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        replica = paceline.Replica(model, optimizer, sync=sync)
        loader = paceline.Loader(Words(), global_batch=8, num_epochs=num_epochs, collate_fn=collate)
        paceline.load_latest(folder, replica, loader, schedule)
        positions = []
        for batch in loader:
            labels = batch.data["labels"]
            logits = replica(batch.data["tokens"])
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
            replica.backward(loss, weight=batch.count(labels != -100), reduction="sum")
            result = replica.update()
            schedule.step()
            positions.append((batch.interval.start, optimizer.param_groups[0]["lr"], result.loss))
            if replica.should_save(every=every):
                paceline.save(folder, replica, loader, schedule)
            if replica.num_updates == stop_at:
                group.membership.leave()  # a checkpoint that was begun is finished: what is lost is what came after it
                return positions, None
        with replica.consensus():
            final = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        replica.close()
        return positions, final


def mark(name):
    """Return a rule that is killed in every run, unless it differs in its codec or in its first steps from another."""
    is_more = name.endswith(("after synchronous steps", "with top_k")) and not name.startswith(
        ("local_sgd", "every_step")
    )
    return pytest.param(name, marks=[pytest.mark.slow, pytest.mark.campaign] if is_more else [])


@pytest.mark.parametrize("name", [mark(name) for name in (*SYNCHRONOUS, *CODED)])
def test_a_killed_loop_goes_on_bit_for_bit(name, tmp_path):
    sync = (SYNCHRONOUS | CODED)[name]
    for num_workers in (1, 3):
        whole = LocalGroup.run(num_workers, lambda group, n=num_workers: train(group, tmp_path / f"a{n}", sync=sync))
        folder = tmp_path / f"b{num_workers}"
        LocalGroup.run(num_workers, lambda group, folder=folder: train(group, folder, sync=sync, stop_at=7))
        resumed = LocalGroup.run(num_workers, lambda group, folder=folder: train(group, folder, sync=sync))
        for (positions, final), (later, finally_) in zip(whole, resumed, strict=True):
            assert later == positions[4:], "it goes on after the checkpoint of step 4, with its data, rate and losses"
            assert all(torch.equal(tensor, finally_[key]) for key, tensor in final.items())


ASYNCHRONOUS = {name: rule for name, rule in every_rule().items() if rule.is_asynchronous}


MARKS = {
    "asgd": pytest.mark.slow,
    "easgd asynchronous": pytest.mark.slow,
    "ssp": [pytest.mark.slow, pytest.mark.campaign],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in ASYNCHRONOUS])
def test_workers_at_their_own_pace_come_together_to_save(name, tmp_path):
    """One of them goes on bit for bit; several use each sample once, and what they learnt is kept."""
    sync = ASYNCHRONOUS[name]
    whole, expected = LocalGroup.run(1, lambda group: train(group, tmp_path / "whole", sync=sync))[0]
    LocalGroup.run(1, lambda group: train(group, tmp_path / "one", sync=sync, stop_at=7))
    later, final = LocalGroup.run(1, lambda group: train(group, tmp_path / "one", sync=sync))[0]
    assert later == whole[-len(later) :]
    assert all(torch.equal(tensor, final[key]) for key, tensor in expected.items())
    used = LocalGroup.run(3, lambda group: train(group, tmp_path / "three", sync=sync))
    assert len({str(final) for _, final in used}) == 1, "all leave with what the servers have"
    assert (tmp_path / "three" / "step-00000004").is_dir()
    assert max(tmp_path.glob("three/step-*")).name == "step-00000012"


def test_any_number_of_workers_is_one_process_and_goes_on_from_another(tmp_path):
    alone, expected = LocalGroup.run(1, lambda group: train(group, tmp_path / "alone"))[0]
    LocalGroup.run(3, lambda group: train(group, tmp_path / "several", stop_at=5))
    later, final = LocalGroup.run(2, lambda group: train(group, tmp_path / "several"))[0]
    assert [start for start, *_ in later] == [start for start, *_ in alone[4:]]
    for name, tensor in expected.items():
        torch.testing.assert_close(final[name], tensor, rtol=1e-4, atol=1e-5)


def test_replica_and_loader_belong_to_the_workers_around_them():
    def worker(group):
        with group:
            model = nn.Linear(2, 1)
            replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
            loader = paceline.Loader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), 4, num_epochs=1)
            return replica.group is group, len(next(iter(loader)).data[0])

    assert LocalGroup.run(2, worker) == [(True, 2)] * 2


@pytest.mark.parametrize(
    ("sync", "told"),
    [
        (DiLoCo(), "sync diloco exchanges nothing in 10 steps, .* lower period of DiLoCo, or take more steps"),
        (PostLocalSGD(), "post_local_sgd is every_step .* of 10 steps, .* lower synchronous_steps of PostLocalSGD"),
    ],
)
def test_a_rule_that_never_acted_in_a_loop_is_warned_of_once_at_its_end(sync, told):
    [sentence] = _train_and_list_warnings(sync)
    assert re.search(told, sentence)


@pytest.mark.parametrize(("num_before", "sync"), [(0, DiLoCo(period=10)), (16, DiLoCo()), (0, EveryStep())])
def test_a_rule_that_acted_is_not_warned_of_nor_one_that_did_so_before_the_checkpoint(num_before, sync):
    assert _train_and_list_warnings(sync, num_before) == []


def _train_and_list_warnings(sync, num_before=0):
    """Train two workers for 10 steps, after those before a checkpoint, and return the warnings of rules."""

    def work(group):
        with group:
            replica = make_replica(group, sync=sync)
            replica.state.num_updates = num_before
            for _ in range(10):
                replica.backward(replica(torch.ones(1, 2)).sum(), weight=1)
                replica.update()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LocalGroup.run(2, work)
    return [str(warning.message) for warning in caught if warning.category is IdleRuleWarning]


def test_leaving_closes_replicas_the_newest_first_and_once(monkeypatch):
    """Of several, one that was closed by hand and one that nobody refers to any more."""
    closed = []
    close = paceline.replica.replica.GradientReduction.close
    monkeypatch.setattr(
        paceline.replica.replica.GradientReduction, "close", lambda self: (closed.append(self), close(self))
    )

    def work(group):
        with group:
            kept, by_hand, last, forgotten = (make_replica(group) for _ in range(4))
            for replica in (kept, by_hand, last, forgotten):
                replica.backward(replica(torch.ones(1, 2)).sum(), weight=1)
                replica.update()
            by_hand.close()
            del forgotten, replica
            gc.collect()
            del closed[:]
        assert closed == [last._reduction, kept._reduction]
        kept.optimizer.step()  # which no hook guards any more
        kept.close()
        assert len(closed) == 2

    LocalGroup.run(1, work)


def make_replica(group, **settings):
    model = nn.Linear(2, 1)
    return paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group, **settings)


def test_a_process_of_several_that_did_not_join_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Linear(2, 1)
    with pytest.raises(SettingsError, match=r"must join the 2 workers .* `with paceline\.join\(\):`"):
        paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SettingsError, match="must join the 2 workers"):
        paceline.Loader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), 4)


def test_a_loss_without_its_weight_is_refused():
    model = nn.Linear(2, 1)
    replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(GradientError, match=r"weight of a loss must be given.*batch\.count\(\)"):
        replica.backward(replica(torch.ones(3, 2)).mean())
    replica.backward(paceline.Loss(replica(torch.ones(3, 2)).mean(), weight=3))
    assert replica.update().weight == 3


def test_an_optimizer_that_goes_on_without_the_rule_is_refused(tmp_path):
    """Saving the state of module and optimizer alone left DiLoCo's workers apart, without a word."""

    def worker(group, *, loads_replica, begins_anew=False, make=torch.optim.AdamW):
        with group:
            model = nn.Linear(2, 1)
            optimizer = make(model.parameters())
            replica = paceline.Replica(model, optimizer, sync=DiLoCo(period=3))
            for _ in range(2):
                replica.backward(replica(torch.ones(3, 2)).mean(), weight=3)
                replica.update()
            saved = copy.deepcopy(optimizer.state_dict()), replica.state_dict()
            other = nn.Linear(2, 1)
            optimizer = make(other.parameters())
            resumed = paceline.Replica(other, optimizer, sync=DiLoCo(period=3))
            other.load_state_dict(model.state_dict())
            optimizer.load_state_dict(saved[0])
            if loads_replica:
                resumed.load_state_dict(saved[1])
            if begins_anew:
                resumed.begin_anew()
            resumed.backward(resumed(torch.ones(3, 2)).mean(), weight=3)
            replica.backward(replica(torch.ones(3, 2)).mean(), weight=3)
            replica.update()
            resumed.update()
            return torch.equal(model.weight, other.weight)

    assert LocalGroup.run(2, lambda group: worker(group, loads_replica=True)) == [True, True]
    LocalGroup.run(2, lambda group: worker(group, loads_replica=False, begins_anew=True))
    made_with_state = torch.optim.Adagrad
    assert LocalGroup.run(2, lambda group: worker(group, loads_replica=True, make=made_with_state)) == [True, True]
    for make in (torch.optim.AdamW, made_with_state, partial(torch.optim.SGD, lr=0.1, momentum=0.9)):
        with pytest.raises(SettingsError, match=r"diloco must go on from its own state.*paceline\.load_latest"):
            LocalGroup.run(2, lambda group, make=make: worker(group, loads_replica=False, make=make))


def test_a_part_of_a_state_is_refused():
    model = nn.Linear(2, 1)
    replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = replica.state_dict()
    del state["feedback"], state["shared"]
    with pytest.raises(SettingsError, match="must be complete, but feedback, shared is missing"):
        replica.load_state_dict(state)
    other = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), sync="local_sgd")
    with pytest.raises(SettingsError, match="must be of the same sync, but got 'every_step' for 'local_sgd'"):
        other.load_state_dict(replica.state_dict())


def test_saving_in_the_midst_of_a_step_is_refused(tmp_path):
    model = nn.Linear(2, 1)
    with LocalGroup() as group:
        replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = paceline.Loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), 4, num_micro_batches=2)
        for batch in loader:
            replica.backward(replica(batch.data[0]).mean(), weight=batch.count(), last=batch.last)
            with pytest.raises(SettingsError, match="saved between its update and the next backward"):
                paceline.save(tmp_path, replica, loader)
            with pytest.raises(DataError, match="after the last micro-batch of a step"):
                loader.state_dict()
            break
        with pytest.raises(SettingsError, match="a replica must be among what is saved, but got"):
            paceline.save(tmp_path, loader)
        with pytest.raises(SettingsError, match="must have state_dict and load_state_dict, but Membership has not"):
            paceline.save(tmp_path, replica, group.membership)


def test_checkpoints_of_two_trainings_are_not_mixed(tmp_path):
    LocalGroup.run(1, lambda group: train(group, tmp_path, stop_at=4))

    def begin(group):
        with group:
            model = nn.Linear(2, 1)
            paceline.save(tmp_path, paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1)))

    with pytest.raises(SettingsError, match=r"must be empty for a new training, but .* holds step-00000004; call"):
        LocalGroup.run(1, begin)

    def begin_twice(group):
        with group:
            for load in (False, True, False):
                model = nn.Linear(2, 1)
                replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
                if load:
                    paceline.load_latest(tmp_path / "new", replica)
                paceline.save(tmp_path / "new", replica)
                paceline.save(tmp_path / "new", replica)

    with pytest.raises(SettingsError, match=r"must be empty for a new training, but .* holds step-00000000-4; call"):
        LocalGroup.run(1, begin_twice)

    def load_other(group):
        with group:
            model = Tagger(width=13)
            paceline.load_latest(tmp_path, paceline.Replica(model, torch.optim.AdamW(model.parameters())))

    with pytest.raises(CheckpointError, match="must be of the model that it is loaded into"):
        LocalGroup.run(1, load_other)


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path):
    whole, _ = LocalGroup.run(1, lambda group: train(group, tmp_path / "whole"))[0]
    LocalGroup.run(1, lambda group: train(group, tmp_path / "damaged", stop_at=9))
    newest = max((tmp_path / "damaged").glob("step-*"))
    next(newest.glob("*.safetensors")).write_bytes(b"")
    with pytest.warns(UserWarning, match="step-00000008 is damaged and was skipped"):
        later, _ = LocalGroup.run(1, lambda group: train(group, tmp_path / "damaged"))[0]
    assert later == whole[4:]


def test_dropout_goes_on_where_it_was(tmp_path):
    def worker(group, folder, stop_at=None):
        with group:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
            replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
            loader = paceline.Loader(torch.utils.data.TensorDataset(torch.ones(64, 4)), 8, num_epochs=1)
            paceline.load_latest(folder, replica, loader)
            for batch in loader:
                replica.backward(replica(batch.data[0]).mean(), weight=batch.count())
                replica.update()
                if replica.should_save(every=3):
                    paceline.save(folder, replica, loader)
                if replica.num_updates == stop_at:
                    return None
            return model.state_dict()

    (whole,) = LocalGroup.run(1, lambda group: worker(group, tmp_path / "a"))
    LocalGroup.run(1, lambda group: worker(group, tmp_path / "b", stop_at=4))
    (resumed,) = LocalGroup.run(1, lambda group: worker(group, tmp_path / "b"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_two_replicas_are_one_checkpoint(tmp_path):
    """As the two networks of a GAN."""

    def worker(group, stop_at=None):
        with group:
            nets = [nn.Linear(2, 2), nn.Linear(2, 1)]
            for number, net in enumerate(nets):
                for parameter in net.parameters():
                    nn.init.constant_(parameter, 0.1 * (number + 1))
            generator, critic = (paceline.Replica(net, torch.optim.AdamW(net.parameters(), lr=0.1)) for net in nets)
            loader = paceline.Loader(
                torch.utils.data.TensorDataset(torch.arange(32.0).view(16, 2) / 32), 4, num_epochs=2
            )
            paceline.load_latest(tmp_path / str(stop_at is None and group.size), critic, generator, loader)
            for batch in loader:
                (real,) = batch.data
                loss = critic(nets[0](real).detach()).mean() - critic(real).mean()
                critic.backward(loss, weight=batch.count())
                critic.update()
                generator.backward(-nets[1](generator(real)).mean(), weight=batch.count())
                generator.update()
                if stop_at and generator.num_updates == 3:
                    paceline.save(tmp_path / "x", critic, generator, loader)
                if generator.num_updates == stop_at:
                    return None
            return {**nets[0].state_dict(prefix="g."), **nets[1].state_dict(prefix="c.")}

    whole = LocalGroup.run(2, worker)[0]
    LocalGroup.run(2, lambda group: worker(group, stop_at=5))
    (tmp_path / "x").rename(tmp_path / "2")
    resumed = LocalGroup.run(2, worker)[0]
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def stop_in_the_middle(folder):
    """Return what the process would end with, and the updates done."""
    try:
        return 0, train_until_signal(folder)
    except SystemExit as error:
        return error.code, 0


def train_until_signal(folder):
    """A signal comes to rank 1 in its fourth step."""
    torch.set_num_threads(1)
    with paceline.join() as group:
        model = nn.Linear(2, 1)
        replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = paceline.Loader(torch.utils.data.TensorDataset(torch.ones(400, 2)), 4, num_epochs=1)
        paceline.load_latest(folder, replica, loader)
        for batch in loader:
            replica.backward(replica(batch.data[0]).mean(), weight=batch.count())
            replica.update()
            if group.rank == 1 and replica.num_updates == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            if replica.should_save(every=1000):
                paceline.save(folder, replica, loader)
    return replica.num_updates


def test_a_signal_saves_ends_the_loop_and_leaves_with_75(tmp_path):
    stopped = run_processes(2, stop_in_the_middle, {"folder": str(tmp_path)})
    assert [result.value for result in stopped] == [[75, 0], [75, 0]], stopped[0].output
    (checkpoint,) = tmp_path.glob("step-*")
    step = int(checkpoint.name.removeprefix("step-"))
    assert 4 <= step <= 6
    ended = run_processes(2, stop_in_the_middle, {"folder": str(tmp_path)})
    assert [result.value for result in ended] == [[0, 100], [0, 100]], ended[0].output


def make_gan():
    nets = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
    for number, net in enumerate(nets):
        for parameter in net.parameters():
            nn.init.constant_(parameter, 0.1 * (number + 1))
    return nets


def lose(critic, generator, real):
    return critic(generator(real).detach()).square().mean() - critic(real).mean()


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("landing", ["update", "arrival"])
def test_gradients_that_another_loss_has_left_are_no_part_of_a_step(num_workers, landing):
    """The generator's loss goes back through the critic: what it leaves there must not enter the critic's next step."""
    real = torch.arange(8.0, dtype=torch.float64).view(4, 2) / 8

    def worker(group):
        with group:
            nets = make_gan()
            generator, critic = (
                paceline.Replica(net, torch.optim.SGD(net.parameters(), lr=0.1), landing=landing) for net in nets
            )
            for _ in range(4):
                for micro in range(2):
                    critic.backward(lose(critic, nets[0], real), weight=4, last=micro == 1)
                critic.update()
                generator.backward(-nets[1](generator(real)).mean(), weight=4)
                generator.update()
            return {**nets[0].state_dict(prefix="g."), **nets[1].state_dict(prefix="c.")}

    generator, critic = make_gan()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic)]
    for _ in range(4):
        critic.zero_grad()
        lose(critic, generator, real).backward()
        optimizers[1].step()
        generator.zero_grad()
        (-critic(generator(real)).mean()).backward()
        optimizers[0].step()
    expected = {**generator.state_dict(prefix="g."), **critic.state_dict(prefix="c.")}
    for found in LocalGroup.run(num_workers, worker):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)  # the rounding of doubles


def test_a_loss_that_goes_back_through_a_step_on_its_way_is_refused():
    def worker(group):
        with group:
            generator, critic = make_gan()
            replica = paceline.Replica(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
            real = torch.ones(4, 2, dtype=torch.float64)
            replica.backward(lose(replica, generator, real), weight=4)
            critic(generator(real)).mean().backward()

    with pytest.raises(GradientError, match=r"made once before update, but it was made twice.*call update before"):
        LocalGroup.run(2, worker)
