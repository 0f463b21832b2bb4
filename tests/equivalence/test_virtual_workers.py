"""Training with virtual workers: the same bits on any number of workers, and through any change of it."""

import hashlib
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.comm import LocalGroup
from paceline.data import virtual_workers
from paceline.errors import GradientError, NonFiniteError, SettingsError
from paceline.programs.summation_tree import SummationTree
from paceline.replica.step_buffers import StepBuffers
from paceline.sync import EveryStep
from paceline.testing import check_exits, run_processes

NUM_VIRTUAL = 12
NUM_STEPS = 6
NUM_SAMPLES = 110
"""Samples of an epoch: of global batches of 36 the last has two, so that ten virtual workers have none of it."""


SEEDING = threading.Lock()
"""Threads share torch's generator."""


class Points(nn.Module):
    """A perceptron with dropout, one layer of which some samples do not use."""

    def __init__(self):
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        hidden = F.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        if x[0, 0] > 0.5:
            hidden = hidden + self.rare(hidden)
        return self.last(hidden)


class Pictures(nn.Module):
    """A convolution with BatchNorm, a buffer that counts, and one that is a moving average by its own hand."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("constant", torch.ones(2))

    def forward(self, x):
        hidden = self.norm(self.convolution(x)).relu().mean((2, 3))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.head(hidden - self.mean)


class Words(nn.Module):
    """A small transformer whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


def make_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))


def draw(*shape, high=None):
    generator = torch.Generator().manual_seed(5)
    if high is None:
        return torch.randn(*shape, generator=generator)
    return torch.randint(high, shape, generator=generator)


def mean_over_asked(logits, targets):
    """Return a mean over the tokens whose target is not 0, and their number."""
    is_asked = targets != 0
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")[is_asked.flatten()].sum()
    return total / is_asked.sum().clamp(min=1), float(is_asked.sum())


def loss_of(replica, batch, kind):
    inputs, targets = batch.data
    if kind == "gpt2":
        loss, weight = mean_over_asked(replica(inputs).logits, targets)
    elif kind == "words":
        loss, weight = mean_over_asked(replica(inputs), targets)
    else:
        loss, weight = F.cross_entropy(replica(inputs), targets), batch.count()
    return loss, weight / 7 if batch.num_samples else 0.0  # sums of whole numbers would be the same in any order


def make_problem(kind):
    """Return a model and its data, the same in every process."""
    with SEEDING:
        torch.manual_seed(0)
        model = {"points": Points, "pictures": Pictures, "words": Words, "gpt2": make_gpt2}[kind]()
    classes = draw(NUM_SAMPLES, high=3)
    tokens = draw(NUM_SAMPLES, 7, high=11)
    inputs, targets = {
        "points": (draw(NUM_SAMPLES, 6), classes),
        "pictures": (draw(NUM_SAMPLES, 1, 6, 6), classes),
        "words": (tokens[:, :-1], tokens[:, 1:]),
        "gpt2": (tokens[:, :-1], tokens[:, 1:]),
    }[kind]
    return model, torch.utils.data.TensorDataset(inputs, targets)


def hash_all(*values):
    """Return a hash of all tensors in nested mappings and lists."""
    found = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value):
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            found.update(repr(value).encode())

    add(values)
    return found.hexdigest()[:16]


def train_kinds(kinds, directory=None, until=NUM_STEPS, num_virtual_workers=NUM_VIRTUAL, mutant=None):
    """Train a model of each kind; return hashes of parameters, buffers, optimizer's state and losses."""
    if mutant is not None:
        mutate(mutant)
    results = {}
    with paceline.join(timeout_s=58) as group:
        for kind in kinds:
            model, dataset = make_problem(kind)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            options = {"num_virtual_workers": num_virtual_workers}
            replica = paceline.Replica(model, optimizer, clip_norm=0.5, bucket_bytes=900, hash_interval=2, **options)
            loader = paceline.Loader(dataset, 36, num_steps=until, **options)
            if directory is not None:
                paceline.load_latest(f"{directory}/{kind}", replica, loader)
            losses = []
            for batch in loader:
                loss, weight = loss_of(replica, batch, kind)
                replica.backward(loss, weight=weight, last=batch.last)
                if batch.last:
                    losses.append(repr(replica.update().loss))
            if directory is not None:
                paceline.save(f"{directory}/{kind}", replica, loader)
            results[kind] = [hash_all(model.state_dict()), hash_all(optimizer.state_dict()["state"]), losses[-1]]
            replica.close()
            group.membership.loaders.clear()
    return results


def run(num_workers, kinds, **options):
    """Return what all workers have in common after they trained."""
    results = run_processes(num_workers, train_kinds, {"kinds": kinds, **options})
    check_exits(results)
    for result in results:
        assert result.value == results[0].value
    return results[0].value


KINDS = ["points", "pictures", "words", "gpt2"]


MORE = [pytest.mark.slow, pytest.mark.campaign]


@pytest.fixture(scope="module")
def alone():
    """Hashes after a training on one worker."""
    return run(1, KINDS)


@pytest.mark.parametrize("num_workers", [2, 3, *(pytest.param(num, marks=MORE) for num in (4, 5))])
def test_any_number_of_workers_trains_the_same_bits(num_workers, alone):
    kinds = KINDS[: 4 if num_workers == 2 else 3]  # transformers is imported by each worker anew
    assert run(num_workers, kinds) == {kind: alone[kind] for kind in kinds}


def test_the_number_of_workers_may_change_on_the_way(tmp_path, alone):
    kinds = ["points", "pictures"]
    for until, num_workers in enumerate([4, 3, 2, 5, 1, 4], start=1):
        found = run(num_workers, kinds, directory=str(tmp_path), until=until)
    assert found == {kind: alone[kind] for kind in kinds}


def mutate(mutant):
    """Make one thing depend on workers, in this process."""
    if mutant == "order":  # blocks in the order of workers in place of the tree's
        make = SummationTree.__init__

        def make_and_sort(tree, *arguments):
            make(tree, *arguments)
            tree.blocks.sort(key=lambda block: block.rank)

        SummationTree.__init__ = make_and_sort
    elif mutant == "random":  # random numbers by the place on a worker in place of the virtual worker's
        derive, places = virtual_workers.derive_seed, itertools.count()
        virtual_workers.derive_seed = lambda seed, step, number: derive(seed, step, next(places))
    elif mutant == "buffers":  # each virtual worker goes on with the buffers of the one before
        StepBuffers.take = lambda self: self._taken.append([held.tensor.clone() for held in self._held])


@pytest.mark.parametrize(("mutant", "kind"), [("order", "points"), ("random", "points"), ("buffers", "pictures")])
def test_what_depends_on_workers_is_seen(mutant, kind):
    """A guard of the tests above: their models would show it."""
    assert run(5, [kind], mutant=mutant) != run(1, [kind], mutant=mutant)


def train_pictures(group, *, num_backward=None, **options):
    """Take a step in a thread."""
    model, dataset = make_problem("pictures")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"num_virtual_workers": 4} | options
    replica = paceline.Replica(model, optimizer, group=group, **options)
    loader = paceline.Loader(dataset, 36, group=group, num_steps=1, num_virtual_workers=4)
    assert len(loader) == 4 // group.size
    for number, batch in enumerate(loader, start=1):
        last = batch.last if num_backward is None else number == num_backward
        replica.backward(F.cross_entropy(replica(batch.inputs), batch.targets), weight=batch.count(), last=last)
    return replica.update()


def train_through_a_bad_step(group):
    """Return a hash after steps of which the second has a loss that is NaN in one virtual worker."""
    model, dataset = make_problem("pictures")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = paceline.Replica(model, optimizer, group=group, num_virtual_workers=7)
    loader = paceline.Loader(dataset, 36, group=group, num_steps=3, num_virtual_workers=7)
    for batch in loader:
        loss = F.cross_entropy(replica(batch.inputs), batch.targets)
        is_bad = replica.num_updates == 1 and batch.virtual_worker == 4 and loader.step == 1
        replica.backward(loss * float("nan") if is_bad else loss, weight=batch.count(), last=batch.last)
        if batch.last and loader.step == 1:
            with pytest.raises(NonFiniteError, match="the loss must be finite, but at step 1 it is not on rank"):
                replica.update()
        elif batch.last:
            replica.update()
    assert replica.num_updates == 2
    return hash_all(model.state_dict(), optimizer.state_dict()["state"])


def test_a_step_that_fails_leaves_nothing_behind():
    (alone,) = LocalGroup.run(1, train_through_a_bad_step)
    assert LocalGroup.run(3, train_through_a_bad_step) == [alone] * 3


def train_with_an_unused_layer(group):
    model, dataset = make_problem("pictures")
    model.idle = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    replica = paceline.Replica(model, optimizer, group=group, num_virtual_workers=4)
    before = hash_all(model.idle.state_dict())
    for batch in paceline.Loader(dataset, 36, group=group, num_steps=2, num_virtual_workers=4):
        replica.backward(F.cross_entropy(replica(batch.inputs), batch.targets), weight=batch.count(), last=batch.last)
        if batch.last:
            replica.update()
    assert hash_all(model.idle.state_dict()) == before
    assert model.idle.weight not in optimizer.state
    return hash_all([model.convolution.state_dict(), model.head.state_dict()])


@pytest.mark.filterwarnings("ignore:2 parameters had no gradient")
def test_what_no_virtual_worker_uses_has_no_gradient():
    found = [one for num_workers in (1, 2, 4) for one in LocalGroup.run(num_workers, train_with_an_unused_layer)]
    assert found == [found[0]] * 7


def test_a_step_needs_every_virtual_worker():
    with pytest.raises(GradientError, match=r"rank 0 has 4 of 4, and got last=True in call 3 of a step; iterate over"):
        LocalGroup.run(1, lambda group: train_pictures(group, num_backward=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "diloco"}, "got sync diloco, whose workers train models of their own; take every_step"),
        ({"sync": EveryStep(codec="int8")}, "got codec int8, which rounds what each worker sends"),
        ({"sync": EveryStep(program="ring")}, "got program ring, which sums in its own order"),
        ({"landing": "arrival"}, "got landing arrival; take update"),
        ({"batch_norm": "global"}, "got batch_norm global; take local"),
        ({"num_virtual_workers": 1}, "num_virtual_workers must be at least the number of workers, but got 1 for 2"),
        ({"num_virtual_workers": 0}, "num_virtual_workers must be"),
    ],
)
def test_what_would_depend_on_workers_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        LocalGroup.run(2, lambda group: train_pictures(group, **options))


def test_bytes_are_those_of_an_all_reduce_where_each_worker_has_one_block():
    plain = LocalGroup.run(2, lambda group: train_plain(group).wire_bytes)[0]
    assert LocalGroup.run(2, lambda group: train_pictures(group).wire_bytes)[0] == plain


def train_plain(group):
    model, dataset = make_problem("pictures")
    replica = paceline.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
    for batch in paceline.Loader(dataset, 36, group=group, num_steps=1):
        replica.backward(F.cross_entropy(replica(batch.inputs), batch.targets), weight=batch.count())
    return replica.update()


def test_other_arithmetic_is_refused(tmp_path):
    run(1, ["points"], directory=str(tmp_path), until=2)
    results = run_processes(1, train_with_threads, {"directory": str(tmp_path), "num_threads": 2})
    assert "num_threads must be that of the checkpoint with num_virtual_workers" in results[0].output
    assert "got 2 instead of 1; go on with the same, or without num_virtual_workers" in results[0].output


def train_with_threads(directory, num_threads):
    torch.set_num_threads(num_threads)
    return train_kinds(["points"], directory=directory, until=4)
