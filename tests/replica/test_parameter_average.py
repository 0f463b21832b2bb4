"""Moving averages of parameters: against torch's, under every rule, saved and resized."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.comm import LocalGroup
from paceline.data.order import apportion
from paceline.errors import SettingsError
from paceline.replica import Replica
from paceline.replica.state import capture, restore
from paceline.sync import Rule

DECAY = 0.8
NUM_STEPS = 7
NUM_SAMPLES = 12
RELAXED = [
    {"name": "local_sgd", "period": 3, "synchronous_steps": 0},
    {"name": "diloco", "period": 3, "synchronous_steps": 0},
    {"name": "streaming_diloco", "period": 4, "num_fragments": 2, "synchronous_steps": 0},
    {"name": "easgd", "period": 2},
    {"name": "dpsgd"},
    {"name": "push_sum"},
    {"name": "scaffold", "period": 3},
    {"name": "choco_sgd"},
    {"name": "parameter_server"},
]
_SEEDING = threading.Lock()  # threads share torch's generator


class Net(nn.Module):
    """Two layers, one of them frozen, with statistics of batches in between."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 1)

    def forward(self, inputs):
        return self.last(self.frozen(torch.tanh(self.norm(self.first(inputs)))))


def make_module(kind=Net, seed=0):
    with _SEEDING:
        torch.manual_seed(seed)
        return kind().double()


def make_plain():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def make_replica(module, group, *, sync="every_step", ema=DECAY, **options):
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    return Replica(module, optimizer, group=group, sync=sync, ema=ema, **options)


def samples_of(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(NUM_SAMPLES, 4, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True)


def take_step(replica, step, shares=None):
    """Take this worker's share of a step's samples."""
    counts = apportion(NUM_SAMPLES, shares or [1.0] * replica.group.size)
    first, count = sum(counts[: replica.group.rank]), counts[replica.group.rank]
    inputs, targets = (tensor[first : first + count] for tensor in samples_of(step))
    dtype = next(replica.module.parameters()).dtype
    replica.backward(F.mse_loss(replica(inputs.to(dtype)), targets.to(dtype)), weight=count)
    return replica.update()


def parameters_of(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def averages_of(replica):
    with replica.averaged():
        return parameters_of(replica.module)


def test_alone_it_is_the_average_of_torch():
    module = make_module()
    replica = make_replica(module, LocalGroup())
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(NUM_STEPS):
        take_step(replica, step)
        average.update_parameters(module)
    found = averages_of(replica)
    for name, expected in average.module.named_parameters():
        assert torch.equal(found[name], expected), name
    assert not torch.equal(found["first.weight"], module.first.weight)


@pytest.mark.parametrize("landing", ["update", "arrival"])
@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_have_the_average_of_one(num_workers, landing):
    def worker(group):
        replica = make_replica(make_module(make_plain), group, landing=landing, bucket_bytes=100)
        for step in range(NUM_STEPS):
            take_step(replica, step, [1.0 + rank for rank in range(group.size)])
        averages = averages_of(replica)
        replica.close()
        return averages

    (alone,) = LocalGroup.run(1, worker)
    for averages in LocalGroup.run(num_workers, worker):
        for name, expected in alone.items():
            torch.testing.assert_close(averages[name], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sync", RELAXED, ids=lambda sync: sync["name"])
def test_where_workers_differ_it_is_the_average_of_their_mean(sync):
    """Whenever they meet; and what they train is left as it was."""

    def worker(group):
        module = make_module(make_plain)
        replica = make_replica(module, group, sync=sync)
        expected = None
        for step in range(NUM_STEPS):
            take_step(replica, step)
            means = parameters_of(module)
            for name, tensor in means.items():
                group.all_reduce(tensor, name=f"mean {step} {name}").wait()
                tensor /= group.size
            expected = expected or copy.deepcopy(means)
            if step:
                for name, tensor in expected.items():
                    tensor.lerp_(means[name], 1 - DECAY)
        before = parameters_of(module)
        found = averages_of(replica)
        assert all(torch.equal(before[name], tensor) for name, tensor in parameters_of(module).items())
        replica.close()
        return found, expected

    results = LocalGroup.run(3, worker)
    for found, expected in results:
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)
            assert torch.equal(found[name], results[0][0][name])


def test_outside_all_is_as_it_was_and_buffers_are_the_models():
    replica = make_replica(make_module(), LocalGroup())
    for step in range(3):
        take_step(replica, step)
    before = copy.deepcopy(replica.module.state_dict())
    inside = {}

    def look():
        with replica.averaged():
            inside.update(copy.deepcopy(replica.module.state_dict()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look()
    after = replica.module.state_dict()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
        is_averaged = name.startswith(("first", "last", "norm.weight", "norm.bias"))
        assert torch.equal(tensor, inside[name]) != is_averaged, name


def test_before_the_first_update_parameters_are_their_own_average():
    replica = make_replica(make_module(), LocalGroup())
    before = parameters_of(replica.module)
    assert all(torch.equal(before[name], tensor) for name, tensor in averages_of(replica).items())
    take_step(replica, 0)
    after = parameters_of(replica.module)
    assert all(torch.equal(after[name], tensor) for name, tensor in averages_of(replica).items())


def test_of_coarse_parameters_averages_are_fine():
    """In bf16 a step of 1 - decay = 0.001 of what is left would be rounded away."""
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.fill_(1.0)
    replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.0), group=LocalGroup(), ema=0.999)
    for step in range(3):
        replica.backward(module.weight.sum(), weight=1)
        replica.update()
        with torch.no_grad():
            module.weight.fill_(2.0 + step)
    average = replica.state.average.tensors["weight"]
    assert average.dtype == torch.float32
    assert float(average) == pytest.approx(1 + 0.001 * 1 * 0.999 + 0.001 * (3 - 1.001), rel=1e-5)


def test_a_step_that_overflowed_is_none():
    module = make_module(make_plain).float()
    replica = make_replica(module, LocalGroup(), precision="fp16")
    while take_step(replica, 0).skipped:  # while it finds its scale
        pass
    before = averages_of(replica)
    module[0].weight.data += 1.0
    loss = F.mse_loss(replica(samples_of(1)[0].float()), samples_of(1)[1].float())
    loss.register_hook(lambda gradient: gradient * float("inf"))
    replica.backward(loss, weight=1)
    assert replica.update().skipped
    assert all(torch.equal(before[name], tensor) for name, tensor in averages_of(replica).items())


def save(replica, directory, step):
    tensors, document = capture(replica)
    if replica.group.rank:
        return None
    store = CheckpointStore(directory, keep=None)
    checkpoint = Checkpoint.open(store.save(tensors, document, step).path)
    store.close()
    return checkpoint


@pytest.mark.parametrize("sync", [{"name": "every_step"}, *RELAXED[:2], RELAXED[4]], ids=lambda sync: sync["name"])
@pytest.mark.parametrize("num_later", [1, 2, 3])
def test_averages_are_saved_and_fit_any_number_of_workers(tmp_path, sync, num_later):
    def before(group):
        replica = make_replica(make_module(), group, sync=sync)
        for step in range(4):
            take_step(replica, step)
        averages = averages_of(replica)
        save(replica, tmp_path, 4)
        for step in range(4, NUM_STEPS):
            take_step(replica, step)
        later = averages_of(replica)
        replica.close()
        return averages, later

    def after(group):
        replica = make_replica(make_module(seed=1), group, sync=sync)
        restore(Checkpoint.open(tmp_path / "step-00000004") if group.rank == 0 else None, replica)
        averages = averages_of(replica)
        for step in range(4, NUM_STEPS):
            take_step(replica, step)
        later = averages_of(replica)
        replica.close()
        return averages, later

    straight, resumed = LocalGroup.run(2, before), LocalGroup.run(num_later, after)
    for averages, later in resumed:
        for name, expected in straight[0][0].items():
            # Means of means of two are exact but for the last bit.
            torch.testing.assert_close(averages[name], expected, rtol=1e-14, atol=0)
            if num_later == 2:
                assert torch.equal(averages[name], expected)
                assert torch.equal(later[name], straight[0][1][name])
    saved = Checkpoint.open(tmp_path / "step-00000004").list_tensors()
    assert {name for name in saved if name.startswith("ema/")} == {
        f"ema/{name}" for name in straight[0][0] if not name.startswith("frozen")
    }


def test_a_checkpoint_without_averages_begins_them_and_one_with_them_needs_none(tmp_path):
    without = make_replica(make_module(), LocalGroup(), ema=None)
    take_step(without, 0)
    checkpoint = save(without, tmp_path, 1)
    begun = make_replica(make_module(seed=1), LocalGroup())
    restore(checkpoint, begun)
    assert not begun.state.average.is_begun
    take_step(begun, 1)
    now = parameters_of(begun.module)
    assert all(torch.equal(now[name], tensor) for name, tensor in averages_of(begun).items())
    again = make_replica(make_module(seed=2), LocalGroup(), ema=None)
    restore(save(begun, tmp_path, 2), again)
    assert torch.equal(again.module.first.weight, begun.module.first.weight)


@pytest.mark.parametrize("sync", ["every_step", "local_sgd"])
def test_a_loop_of_ones_own_goes_on_with_them_bit_for_bit(tmp_path, sync):
    def worker(group, num_steps, folder):
        replica = make_replica(make_module(), group, sync=sync)
        paceline.load_latest(folder, replica)
        while replica.num_updates < num_steps:
            take_step(replica, replica.num_updates)
        paceline.save(folder, replica)
        averages = averages_of(replica)
        replica.close()
        group.membership.leave()
        return averages

    straight = LocalGroup.run(2, lambda group: worker(group, NUM_STEPS, tmp_path / "straight"))
    LocalGroup.run(2, lambda group: worker(group, 3, tmp_path / "resumed"))
    resumed = LocalGroup.run(2, lambda group: worker(group, NUM_STEPS, tmp_path / "resumed"))
    for ours, theirs in zip(resumed, straight, strict=True):
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_state_dict_has_them():
    replica = make_replica(make_module(), LocalGroup())
    for step in range(3):
        take_step(replica, step)
    again = make_replica(make_module(), LocalGroup())
    again.module.load_state_dict(replica.module.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(replica.optimizer.state_dict()))
    again.load_state_dict(copy.deepcopy(replica.state_dict()))
    for one in (replica, again):
        take_step(one, 3)
    ours = averages_of(again)
    assert all(torch.equal(ours[name], tensor) for name, tensor in averages_of(replica).items())


@pytest.mark.parametrize("ema", [0.0, 1.0, -0.5])
def test_what_is_no_decay_is_refused(ema):
    with pytest.raises(SettingsError, match=f"ema must be a decay between 0 and 1, such as 0.999, but got {ema}"):
        make_replica(make_module(), LocalGroup(), ema=ema)


def test_what_cannot_be_is_refused():
    with pytest.raises(SettingsError, match="landing must be update, but got next_forward with ema"):
        make_replica(make_module(), LocalGroup(), landing="next_forward")
    replica = make_replica(make_module(), LocalGroup(), ema=None)
    with pytest.raises(SettingsError, match="ema must be given to the Replica"), replica.averaged():
        pass


def test_every_relaxed_rule_that_steps_together_is_tried():
    from paceline.registry import list_variants

    rules = {name: rule() for name, rule in list_variants(Rule).items()}
    relaxed = {name for name, rule in rules.items() if not rule.keeps_replicas_equal and not rule.is_asynchronous}
    assert relaxed - {rule["name"] for rule in RELAXED} <= {
        "adaptive_local_sgd",
        "adaptive_mixing",
        "hierarchical_local_sgd",
        "post_local_sgd",
    }, "rules of a family that is tried"
