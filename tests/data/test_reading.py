"""Stages of reading, their times, the limit in bytes, and the choice of threads or processes."""

import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from paceline import Loader
from paceline.comm.local_group import LocalGroup
from paceline.data import Source
from paceline.data.read_ahead import ReadingClock, ReadTimes
from paceline.data.read_by_measurement import StepCost, choose_kind, count_readers
from paceline.errors import SettingsError

SAMPLE_BYTES = 400


class Slow(Source):
    """Samples of 400 bytes, whose stages wait to be let go on."""

    is_thread_safe = True

    def __init__(self, num_samples=64, decode_s=0.0, hold=None):
        self._num_samples, self._decode_s, self._hold = num_samples, decode_s, hold
        self.fetched, self.decoded = [], []

    def __len__(self):
        return self._num_samples

    def read(self, indices):
        return self.decode(self.fetch(indices))

    def fetch(self, indices):
        self.fetched.append(threading.current_thread().name)
        return indices

    def decode(self, fetched, seeds=None):
        if self._hold is not None:
            self._hold.acquire()
        time.sleep(self._decode_s)
        self.decoded.append(threading.current_thread().name)
        return torch.from_numpy(fetched).float()[:, None].expand(-1, SAMPLE_BYTES // 4).contiguous()


def make_loader(source, batch=4, **options):
    return Loader(source, batch, group=LocalGroup.create(1)[0], shuffle=False, **options)


def wait_until(holds):
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_one_thread_fetches_while_others_decode():
    hold = threading.Semaphore(0)
    source = Slow(hold=hold)
    batches = iter(make_loader(source, num_threads=2, num_epochs=1))
    reading = threading.Thread(target=lambda: seen.extend(batch.data[:, 0].tolist() for batch in batches))
    seen = []
    reading.start()
    hold.release()  # the size of a step is known from the first, and then more are begun
    wait_until(lambda: len(source.fetched) == 4)  # the next two are being decoded, and one is fetched
    hold.release(len(source))
    reading.join(30)
    assert seen == np.arange(64).reshape(16, 4).tolist()
    assert len(set(source.fetched)) == 1
    assert len(set(source.decoded)) == 2
    assert not set(source.fetched) & set(source.decoded)


@pytest.mark.parametrize("options", [{}, {"num_threads": 3}, {"num_processes": 2}], ids=str)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_no_more_bytes_are_read_ahead_than_allowed(options, limit):
    step_bytes = 4 * SAMPLE_BYTES
    loader = make_loader(Slow(), num_epochs=1, prefetch=6, read_ahead_bytes=limit * step_bytes, **options)
    most, seen = 0, []
    for batch in loader:
        seen += batch.data[:, 0].tolist()
        if limit == 1000:  # with room, more is read ahead
            wait_until(lambda: loader._clock.most_bytes > 2 * step_bytes)
        most = max(most, loader._clock.most_bytes)
    assert seen == list(range(64))
    assert most <= max(limit, 1) * step_bytes


def test_a_step_larger_than_the_limit_is_read_nevertheless():
    loader = make_loader(Slow(), num_epochs=1, read_ahead_bytes=1, num_micro_batches=4, batch=8, num_threads=2)
    assert sum(batch.num_samples for batch in loader) == 64


def test_an_error_in_a_thread_reaches_the_loop():
    class Broken(Slow):
        def decode(self, fetched, seeds=None):
            if 20 in fetched:
                raise OSError("sample 20 is broken")
            return super().decode(fetched)

    seen = []
    with pytest.raises(OSError, match="sample 20 is broken"):
        seen.extend(batch.interval.start for batch in make_loader(Broken(), num_threads=2))
    assert seen == [0, 4, 8, 12, 16]


def test_times_name_the_slowest_stage_and_the_stall():
    loader = make_loader(Slow(decode_s=0.02), num_epochs=1, augment=[lambda sample, generator: sample])
    num_samples = sum(batch.num_samples for batch in loader)
    times = loader.take_read_times()
    assert num_samples == times.num_samples == 64
    assert times.num_steps == 16
    assert times.num_bytes == 64 * SAMPLE_BYTES
    assert times.slowest == "decode"
    assert times.busy_s["decode"] >= 16 * 0.02
    assert times.waited_s == pytest.approx(loader.waited_s)
    assert times.waited_s > 8 * 0.02
    assert all(value > 0 for value in times.busy_s.values())
    assert loader.take_read_times().num_samples == 0


def test_a_stage_that_several_do_at_a_time_counts_less():
    busy_s = {"fetch": 1.0, "decode": 3.0, "augment": 0.5, "collate": 0.1}
    common = {"waited_s": 1.0, "used_s": 1.0, "num_samples": 1, "num_bytes": 1, "num_steps": 1}
    assert ReadTimes(busy_s, **common, num_readers=1, is_processes=False).slowest == "decode"
    assert ReadTimes(busy_s, **common, num_readers=4, is_processes=False).slowest == "fetch"
    assert ReadTimes(busy_s, **common, num_readers=4, is_processes=True).slowest == "decode"


def test_a_clock_lets_a_step_be_read_if_nothing_is_ahead():
    clock = ReadingClock(limit_bytes=10)
    assert clock.has_room(0)
    assert not clock.has_room(1), "the size of a step is unknown"


# The choice


@pytest.mark.parametrize(
    ("read_s", "used_s", "cores", "number"),
    [(1.0, 1.3, 8, 1), (1.0, 1.2, 8, 2), (1.0, 0.5, 8, 3), (1.0, 0.5, 2, 2), (1.0, 0.001, 64, 8), (0.0, 0.0, 4, 1)],
)
def test_as_many_readers_as_the_training_needs(read_s, used_s, cores, number):
    assert count_readers(StepCost(read_s, used_s), cores) == number


@pytest.mark.parametrize(
    ("number", "several_s", "is_processes"), [(2, 0.5, False), (2, 0.7, True), (4, 0.3, False), (4, 0.9, True)]
)
def test_processes_where_threads_wait_for_one_another(number, several_s, is_processes):
    assert choose_kind(number, 1.0, several_s) == is_processes


def read_all(source, **options):
    loader = make_loader(source, num_epochs=4, **options)
    batches = [batch.data if isinstance(batch.data, torch.Tensor) else batch.data[0] for batch in loader]
    return torch.cat(batches), loader.take_read_times()


def test_threads_are_chosen_where_they_read_side_by_side(monkeypatch):
    monkeypatch.setattr("paceline.data.read_by_measurement.count_cores", lambda: 2)
    monkeypatch.setattr("paceline.data.read_by_measurement.choose_kind", lambda *_: False)  # whatever else runs here
    found, times = read_all(Slow(decode_s=0.01), num_processes="auto")
    assert torch.equal(found, read_all(Slow())[0])
    assert (times.num_readers, times.is_processes) == (2, False)
    assert "with 2 threads" in times.choice


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_processes_are_chosen_for_data_that_one_thread_alone_may_read(monkeypatch):
    monkeypatch.setattr("paceline.data.read_by_measurement.count_cores", lambda: 2)

    class Single(Slow):
        is_thread_safe = False

    found, times = read_all(Single(decode_s=0.005), num_processes="auto")
    assert torch.equal(found, read_all(Slow())[0])
    assert times.is_processes
    assert "not all that reads" in times.choice


def test_one_thread_stays_where_it_is_fast_enough():
    loader = make_loader(Slow(), num_epochs=1, num_processes="auto")
    for _ in loader:
        time.sleep(0.05)
    times = loader.take_read_times()
    assert (times.num_readers, times.is_processes) == (1, False)


class Drawing(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.rand(2) + index


def test_data_that_draws_is_read_by_a_process_and_disturbs_nothing():
    before = torch.get_rng_state()
    found, times = read_all(Drawing(), num_processes="auto")
    assert torch.equal(torch.get_rng_state(), before)
    assert times.is_processes
    assert "draws from global random generators" in times.choice
    assert torch.equal(found, read_all(Drawing(), num_processes=1)[0])


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(SettingsError, match="either num_processes or num_threads must be left out, but got 2 and 3"):
        make_loader(TensorDataset(torch.zeros(8)), num_processes=2, num_threads=3)
