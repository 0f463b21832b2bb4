"""The chooser on a link that a test makes up: no training, no clock."""

import random

import pytest
import torch

from paceline.comm.link_speed import LinkSpeed, TimedExchange
from paceline.compression import NoCodec
from paceline.replica.codec_chooser import NUM_VALUES, CodecChooser, StepMeasurement, measure_step
from paceline.replica.step_result import BucketTimes, StepTimes
from paceline.sync import EveryStep

SHAPES = [torch.Size((512, 512))] * 8
COMPUTE_S, LATENCY_S = 0.1, 2e-4


class FakeTraining:
    """Workers whose steps take what the codec in use would take on a link."""

    def __init__(self, num_workers=4, noise=0.0, slowdown=None, is_adaptive=True, may_choose=True, **auto):
        rule = EveryStep(codec={"name": "auto", **auto})
        self.choosers = [
            CodecChooser(
                rule,
                SHAPES,
                rank=rank,
                num_workers=num_workers,
                is_adaptive=is_adaptive,
                steps_refused="",
                steps_overlap=True,
                bucket_bytes=None,
                device=torch.device("cpu"),
                may_choose=may_choose,
            )
            for rank in range(num_workers)
        ]
        self.mbit, self.step, self.chosen = 1000.0, 0, []
        self.random, self.noise, self.slowdown = random.Random(0), noise, slowdown or {}

    @property
    def codec(self):
        return self.choosers[0].codec.name

    def take_step(self):
        link = LinkSpeed(LATENCY_S, self.mbit * 1e6 / 8)
        for each in self.choosers:
            price = each._price(each.codec)
            encode_s = price.encode_s * 1e-10
            wire_s = price.wire_s(link)
            factor = self.slowdown.get(each.codec.name, 1.0) * self.random.uniform(1 - self.noise, 1 + self.noise)
            exposed_s = max(wire_s - 0.03, 0.0)
            each.note(
                StepMeasurement(
                    step_s=factor * (COMPUTE_S + encode_s + exposed_s),
                    waited_s=factor * exposed_s,
                    backward_s=0.06,
                    wire_s=wire_s,
                    codec_s=encode_s,
                    latency_s=-1.0 if isinstance(each.codec, NoCodec) else LATENCY_S,
                    copy_s=1e-10,
                )
            )

    def run(self, num_steps, mbit):
        """Take steps, and return those after which the codec changed, counted from 0."""
        self.mbit, changes = mbit, []
        for number in range(num_steps):
            values = [chooser.values() for chooser in self.choosers]  # of the step before
            total = [sum(column) for column in zip(*values, strict=True)]
            for chooser in self.choosers:
                chooser.hear(total)
            self.take_step()
            rules = [chooser.take_next(self.step + 1) for chooser in self.choosers]
            assert all(rule == rules[0] for rule in rules), "all workers choose the same"
            if rules[0] is not None:
                changes.append(number)
                self.chosen.append(self.codec)
            self.step += 1
        return changes


def test_a_fast_network_stays_without_a_codec_whatever_the_noise():
    training = FakeTraining(noise=0.3)
    assert training.run(500, 20000) == []
    assert training.codec == "none"


def test_a_fall_of_the_bandwidth_is_followed_within_twenty_steps_and_a_rise_too():
    training = FakeTraining()
    assert training.run(50, 20000) == []
    (followed,) = training.run(100, 20)
    assert followed <= 6
    assert training.codec in ("one_bit", "power_sgd")
    back = training.run(100, 20000)
    assert back[0] <= 6
    assert training.codec == "none"
    assert len(back) == 2, "one step between sends what is held back"


@pytest.mark.parametrize("mbit", [100, 300, 500, 700, 1000, 2000])
def test_noise_does_not_make_it_flap(mbit):
    training = FakeTraining(noise=0.1)
    changes = training.run(400, mbit)
    assert len(changes) <= 4, training.chosen


def test_one_slow_step_changes_nothing():
    training = FakeTraining()
    training.run(20, 20000)
    assert training.run(1, 5) == []
    assert training.run(50, 20000) == []


def test_a_codec_that_is_slower_than_predicted_is_left_and_not_tried_again_soon():
    training = FakeTraining(slowdown={"power_sgd": 4.0, "one_bit": 4.0})
    training.run(20, 20000)
    training.run(200, 300)
    assert training.codec not in ("power_sgd", "one_bit")
    assert len([name for name in training.chosen if name in ("power_sgd", "one_bit")]) <= 2


def test_after_one_codec_that_is_slower_than_predicted_the_others_are_not_tried_in_turn():
    """As on busy cores, where all wait for each other, and it looks like a slow link."""
    slow = dict.fromkeys(("bf16", "int8", "one_bit", "top_k", "power_sgd"), 2.5)
    training = FakeTraining(slowdown=slow)
    training.run(20, 20000)
    training.run(100, 600)
    assert training.codec == "none"
    assert len(set(training.chosen)) <= 2, training.chosen


def test_without_an_adaptive_optimizer_only_what_it_bears_is_chosen():
    training = FakeTraining(is_adaptive=False)
    training.run(100, 20)
    assert training.codec == "int8"
    lenient = FakeTraining(is_adaptive=False, max_loss=1.2)
    lenient.run(100, 20)
    assert lenient.codec in ("top_k", "one_bit", "power_sgd")


def test_a_change_says_why():
    training = FakeTraining()
    training.run(100, 20)
    (change,) = training.choosers[0].take_changes()
    assert (change.before, change.codec, change.codec_of) == ("none", training.codec, "step")
    assert "at 20 Mbit/s" in change.reason
    assert "none " in change.reason
    assert "kept out: its loss is 1.088" in change.reason
    assert training.choosers[0].take_changes() == []


def test_a_restored_choice_goes_on_as_if_nothing_had_happened():
    training, other = FakeTraining(), FakeTraining()
    training.run(60, 20)
    for there, here in zip(training.choosers, other.choosers, strict=True):
        here.load_state_dict(there.state_dict())
        assert here.rule == there.rule
    assert other.codec == training.codec != "none"
    assert other.run(60, 20) == []
    assert other.run(60, 20000)
    assert other.codec == "none"


@pytest.mark.parametrize("mbit", [20, 20000])
def test_what_may_not_choose_leaves_what_was_chosen_and_stays_with_none(mbit):
    training = FakeTraining()
    training.run(50, mbit)
    here = FakeTraining(may_choose=False)
    for chooser, saved in zip(here.choosers, training.choosers, strict=True):
        chooser.load_state_dict(saved.state_dict())
    assert here.codec == training.codec
    here.run(100, 20)
    assert here.chosen == ([] if mbit == 20000 else ["none", "none"]), "by a step that sends what is held back"
    assert (here.codec, here.choosers[0].rule.codec_of) == ("none", "gradient")


def test_steps_count_once_all_workers_have_measured():
    training = FakeTraining(num_workers=2)
    training.take_step()
    values = training.choosers[0].values()
    assert len(values) == 2 * NUM_VALUES
    assert values[NUM_VALUES:] == [0.0] * NUM_VALUES
    for _ in range(50):
        training.choosers[0].hear(values)
    assert not training.choosers[0]._window


def test_a_step_is_measured_by_its_buckets_and_a_codec_by_its_collectives():
    def bucket(index, began_s, ended_s, waited_s):
        return BucketTimes(index, ["x"], 100, 5000, began_s, began_s, ended_s, ended_s, waited_s)

    times = StepTimes(
        began_s=10.0,
        backward_began_s=11.0,
        backward_ended_s=12.0,
        ended_s=15.0,
        buckets=[bucket(0, 11.5, 12.5, 0.5), bucket(1, 12.0, 14.0, 1.5)],
    )
    plain = measure_step(times, [], 1e-10)
    assert (plain.step_s, plain.waited_s, plain.backward_s) == (5.0, 2.0, 1.0)
    assert (plain.wire_s, plain.codec_s, plain.latency_s) == (2.5, 0.0, -1.0)
    timed = [TimedExchange(10**6, 12.0, 13.0), TimedExchange(40, 13.5, 13.75), TimedExchange(10**6, 11.75, 12.5)]
    coded = measure_step(times, timed, 1e-10)
    assert (coded.wire_s, coded.codec_s, coded.latency_s) == (1.5, 1.0, 0.25)
