"""What a checkpoint is made of: several replicas, objects beside them, and what is refused or lost with words."""

import copy
import warnings

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint import CheckpointStore
from paceline.comm import LocalGroup
from paceline.compression.codec import FeedbackDroppedWarning
from paceline.errors import CheckpointError, DivergenceError, SettingsError
from paceline.replica import Replica
from paceline.replica.named_tensors import capture_objects, restore_objects
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
    loss = replica(torch.randn(6, width, generator=generator)).square().mean()
    replica.backward(loss, weight=6.0)
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
    return tensors | {name: tensor.clone() for name, tensor in replica.state.feedback().items()}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("num_after", [1, 3])
def test_two_replicas_and_what_is_beside_them_share_one_checkpoint(tmp_path, num_after):
    """As a GAN has them: of other shapes and rules, each with a schedule, and one moving average of parameters."""

    def make(group):
        generator = make_replica(group, "every_step", lambda: nn.Linear(5, 4))
        critic = make_replica(group, LocalSGD(period=3), lambda: nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)))
        average = copy.deepcopy(generator.module)
        schedule = torch.optim.lr_scheduler.MultiStepLR(generator.optimizer, milestones=[1, 3], gamma=0.1)
        return generator, critic, {"average": average, "schedule": schedule}

    def step_all(replicas, objects, step):
        for replica in replicas:
            take_step(replica, step)
        with torch.no_grad():
            for mean, parameter in zip(objects["average"].parameters(), replicas[0].module.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
        objects["schedule"].step()

    def finish(replicas, objects):
        states = [*map(state_of, replicas), dict(objects["average"].state_dict())]
        rates = objects["schedule"].get_last_lr(), replicas[0].optimizer.param_groups[0]["lr"]
        for replica in replicas:
            replica.close()
        return states, rates

    def work(group, *, is_resumed=False, num_steps=5):
        *replicas, objects = make(group)
        with CheckpointStore(tmp_path) as store:
            if is_resumed:
                checkpoint = newest(store, group)
                for replica, name in zip(replicas, ("generator", "critic"), strict=True):
                    restore(checkpoint, replica, prefix=f"{name}/", hyper_parameters=True)
                assert restore_objects(checkpoint, objects, group)
            else:
                for step in range(2):
                    step_all(replicas, objects, step)
                tensors, document = capture(replicas[0], prefix="generator/")
                more, about = capture(replicas[1], prefix="critic/")
                others, rest = capture_objects(objects)
                save(store, group, tensors | more | others, document | about | rest)
            for step in range(2, num_steps):
                step_all(replicas, objects, step)
        return finish(replicas, objects)

    straight = LocalGroup.run(3, work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of schedules that step before their optimizer
        resumed = LocalGroup.run(
            num_after, lambda group: work(group, is_resumed=True, num_steps=5 if num_after == 3 else 2)
        )
    if num_after == 3:
        for (ours, rates), (theirs, expected) in zip(resumed, straight, strict=True):
            assert rates == expected
            for one, other in zip(ours, theirs, strict=True):
                assert_equal(one, other)
    else:
        [((generator, critic, average), rates)] = resumed
        assert rates == ([pytest.approx(0.001)], pytest.approx(0.001))
        assert not torch.equal(generator["weight"], average["weight"])
        assert critic["0.weight"].shape == (7, 7)


def test_a_name_that_is_not_in_it_is_told_with_those_that_are(tmp_path):
    def work(group):
        replica = make_replica(group)
        with CheckpointStore(tmp_path) as store:
            tensors, document = capture(replica, prefix="generator/")
            others, rest = capture_objects({"rates": torch.optim.lr_scheduler.StepLR(replica.optimizer, 2)})
            save(store, group, tensors | others, document | rest)
            checkpoint = newest(store, group)
            with pytest.raises(CheckpointError, match="got 'critic/' instead of 'generator/'; give it one of these"):
                restore(checkpoint, replica, prefix="critic/")
            with pytest.raises(CheckpointError, match="'rate' is none of 'rates'; give it one of these"):
                restore_objects(checkpoint, {"rate": replica.module}, group)
            assert not restore_objects(None, {}, group)
        replica.close()

    LocalGroup.run(2, work)


def test_a_state_of_other_things_is_refused_with_its_path():
    class Odd:
        def state_dict(self):
            return {"inner": [1, {"open": open}]}

    with pytest.raises(SettingsError, match=r"objects/odd/inner/1/open is a builtin_function_or_method; leave it out"):
        capture_objects({"odd": Odd()})


def test_states_of_any_make_come_back(tmp_path):
    class Box:
        def __init__(self, state):
            self.state = state

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    given = {"a": [1, (2.5, None, "x"), {}], 3: {"deep": torch.arange(4), "flag": True}, "nan": float("inf")}

    def work(group):
        box = Box(given if group.rank == 0 else {"other": 1})
        bare = Box(torch.ones(2, dtype=torch.bfloat16) * (1 + group.rank))
        with CheckpointStore(tmp_path) as store:
            save(store, group, *capture_objects({"box": box, "bare": bare}))
            empty = {"box": Box({}), "bare": Box({})}
            assert restore_objects(newest(store, group), empty, group)
        return empty["box"].state, empty["bare"].state

    for state, bare in LocalGroup.run(3, work):
        tensor = state[3].pop("deep")
        assert torch.equal(tensor, torch.arange(4))
        assert state == {"a": [1, (2.5, None, "x"), {}], 3: {"flag": True}, "nan": float("inf")}
        assert isinstance(state["a"][1], tuple)
        assert torch.equal(bare, torch.ones(2, dtype=torch.bfloat16))
        state[3]["deep"] = tensor


@pytest.mark.parametrize("said", [None, FORMAT + 1])
def test_a_checkpoint_of_another_format_is_refused_with_what_to_do(tmp_path, said):
    """Format 1 said nothing of itself: ``replicas`` by rank, and ``own<rank>/`` among the tensors."""

    def work(group):
        replica = make_replica(group)
        tensors, document = capture(replica)
        old = {"optimizer": {"type": "AdamW", "scalars": {}}, "replicas": [replica.state.document()], "num_workers": 2}
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
    (LocalSGD(period=2, codec=TOP_K), LocalSGD(period=2, codec=TOP_K), 1, "residuals of the codec of sync 'local_sgd'"),
    (
        EveryStep(codec=TOP_K),
        EveryStep(codec="int8"),
        2,
        "codec 'top_k of steps' of 2 workers .* codec 'int8' runs among 2 here",
    ),
    (
        EveryStep(codec=TOP_K),
        EveryStep(codec=TOP_K, codec_of="gradient"),
        2,
        "codec 'top_k of steps' of 2 workers .* codec 'top_k' runs among 2 here",
    ),
    (
        EveryStep(codec=TOP_K, codec_of="gradient"),
        EveryStep(codec=TOP_K),
        1,
        "codec 'top_k' of 2 workers .* no codec runs among 1 here",
    ),
    (EveryStep(codec=TOP_K), DiLoCo(period=2), 2, "codec 'top_k of steps' of 2 workers .* no codec runs among 2 here"),
    (
        DiLoCo(period=2, synchronous_steps=0, codec=TOP_K),
        EveryStep(),
        2,
        "residuals of the codec of sync 'diloco' are dropped",
    ),
    (
        DiLoCo(period=2, synchronous_steps=0, codec=TOP_K),
        LocalSGD(),
        2,
        "residuals of the codec of sync 'diloco' are dropped",
    ),
    (
        ParameterServer(host_size=2, codec=TOP_K),
        ParameterServer(host_size=2, codec=TOP_K),
        4,
        "push codec of 2 workers are dropped, since 2 push to 1 servers",
    ),
    (
        ASGD(codec=TOP_K),
        ASGD(codec=TOP_K),
        3,
        "push codec of 2 workers are dropped, since 3 push to 1 servers here",
    ),
    (
        ASGD(codec=TOP_K),
        ASGD(codec=TOP_K),
        1,
        "push codec of 2 workers are dropped, since 1 push to 1 servers here",
    ),
    (
        ASGD(codec=TOP_K),
        ASGD(codec=TOP_K, num_servers=2),
        2,
        "push codec of 2 workers are dropped, since 2 push to 2 servers",
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


def test_coded_steps_go_on_with_each_workers_own_optimizer_bit_for_bit(tmp_path):
    def work(group, *, is_resumed=False):
        replica = make_replica(group, EveryStep(codec=TOP_K))
        with CheckpointStore(tmp_path) as store:
            if is_resumed:
                restore(newest(store, group), replica)
            else:
                for step in range(3):
                    take_step(replica, step)
                save(store, group, *capture(replica))
        for step in range(3, 6):
            take_step(replica, step)
        replica.close()
        return state_of(replica)

    straight = LocalGroup.run(3, work)
    assert not torch.equal(straight[0]["exp_avg of bias"], straight[1]["exp_avg of bias"])
    for ours, theirs in zip(LocalGroup.run(3, lambda group: work(group, is_resumed=True)), straight, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.parametrize(
    ("rule", "num_after"), [(EveryStep(codec=TOP_K), 2), (EveryStep(codec=TOP_K, codec_of="gradient"), 3)]
)
@pytest.mark.filterwarnings("ignore::paceline.compression.codec.FeedbackDroppedWarning")
def test_coded_steps_elsewhere_begin_from_the_mean_of_the_optimizers(tmp_path, rule, num_after):
    def begin(group):
        replica = make_replica(group, EveryStep(codec=TOP_K))
        for step in range(3):
            take_step(replica, step)
        with CheckpointStore(tmp_path) as store:
            save(store, group, *capture(replica))
        replica.close()
        return state_of(replica)

    def go_on(group):
        replica = make_replica(group, rule)
        with CheckpointStore(tmp_path) as store:
            restore(newest(store, group), replica)
        replica.close()
        return state_of(replica)

    saved, loaded = LocalGroup.run(3, begin), LocalGroup.run(num_after, go_on)
    for state in loaded:
        assert torch.equal(state["weight"], saved[0]["weight"])
        mean = torch.stack([before["exp_avg of weight"] for before in saved]).mean(0)
        torch.testing.assert_close(state["exp_avg of weight"], mean)
    if num_after == 2:
        held_back = [sum(state["weight/worker"] for state in states) for states in (saved, loaded)]
        torch.testing.assert_close(*held_back)


def test_what_is_frozen_keeps_its_optimizer_state_or_is_refused(tmp_path):
    """A resume that freezes a parameter, which its optimizer holds or not."""

    def resume(folder, *, frozen, held):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        model[0].weight.requires_grad_(not frozen)
        given = [p for p in model.parameters() if p.requires_grad or held]
        replica = paceline.Replica(model, torch.optim.AdamW(given))
        paceline.load_latest(folder, replica)
        replica.backward(replica(torch.ones(4, 3)).square().mean(), weight=4)
        replica.update()
        paceline.save(folder, replica)
        return replica.optimizer.state.get(model[0].weight, {}).get("exp_avg")

    for is_begun in (False, True):
        with paceline.join():
            if not is_begun:
                trained = resume(tmp_path, frozen=False, held=True)
                assert trained.any()
                continue
            words = r"what the checkpoint trained must be in the optimizer, .* 0\.weight is frozen and in no parameter"
            with pytest.raises(SettingsError, match=words):
                resume(tmp_path, frozen=True, held=False)
            assert torch.equal(resume(tmp_path, frozen=True, held=True), trained)
