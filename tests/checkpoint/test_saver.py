import gc
import threading
import time

import pytest
import torch

from paceline.checkpoint import AsyncSaver, Checkpoint, CheckpointStore
from paceline.errors import CheckpointError


class GatedStore(CheckpointStore):
    """A store whose saves wait for the test's leave."""

    def __init__(self, directory):
        super().__init__(directory)
        self.gate = threading.Event()
        self.threads = []
        self.pointers = []

    def save(self, tensors, *arguments, **options):
        self.threads.append(threading.current_thread())
        self.pointers.append({name: tensor.data_ptr() for name, tensor in tensors.items()})
        assert self.gate.wait(30)
        return super().save(tensors, *arguments, **options)


@pytest.fixture
def store(tmp_path):
    return GatedStore(tmp_path / "store")


def load(path):
    checkpoint = Checkpoint.open(path)
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in checkpoint.list_tensors().items()}
    checkpoint.load(tensors)
    return tensors, checkpoint.read_document()


def test_what_is_saved_are_the_values_at_the_start(store):
    tensors = {"a": torch.ones(4), "tied": torch.zeros(2, 3).T, "p": torch.nn.Parameter(torch.ones(2))}
    document = {"nested": {"steps": [1]}}
    with AsyncSaver(store) as saver:
        saver.start(tensors, document, step=1)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor += 5
        document["nested"]["steps"].append(2)
        store.gate.set()
        loaded, read = load(saver.wait().path)
    assert torch.equal(loaded["a"], torch.ones(4))
    assert torch.equal(loaded["tied"], torch.zeros(3, 2))
    assert torch.equal(loaded["p"], torch.ones(2))
    assert read == {"nested": {"steps": [1]}}
    assert store.threads[0] is not threading.main_thread()


def test_finished_never_waits_and_reports_each_save_once(store):
    saver = AsyncSaver(store)
    assert saver.finished() == []
    assert saver.wait() is None
    saver.start({"a": torch.ones(1)}, {}, step=1)
    assert saver.finished() == []
    store.gate.set()
    saver.start({"a": torch.ones(1)}, {}, step=2)  # waits for the first
    assert store.list_checkpoints()[-1].name == "step-00000001"
    assert saver.wait().step == 2
    assert [saved.step for saved in saver.finished()] == [1]
    assert saver.finished() == []
    saver.start({"a": torch.ones(1)}, {}, step=3)
    deadline_s = time.monotonic() + 30
    while not (reported := saver.finished()):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert [saved.step for saved in reported] == [3]
    assert saver.wait() is None
    saver.close()


def test_at_most_one_save_is_in_flight(store):
    saver = AsyncSaver(store)
    saver.start({"a": torch.ones(1)}, {}, step=1)
    second = threading.Thread(target=saver.start, args=({"a": torch.zeros(1)}, {}, 2))
    second.start()
    second.join(0.1)
    assert second.is_alive()  # it waits, and has not copied over what is being written
    store.gate.set()
    second.join(30)
    saver.close()
    loaded, _ = load(store.list_checkpoints()[-1])
    assert loaded["a"] == 1


def test_buffers_are_used_again_and_follow_what_changes(store):
    store.gate.set()
    with AsyncSaver(store) as saver:
        for step, tensors in enumerate(
            [
                {"a": torch.ones(4), "b": torch.ones(2)},
                {"a": torch.zeros(4), "b": torch.ones(3)},
                {"a": torch.zeros(4, dtype=torch.int32), "c": torch.ones(3)},
            ]
        ):
            saver.start(tensors, {}, step)
            loaded, _ = load(saver.wait().path)
            assert loaded.keys() == tensors.keys()
            assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    first, second, third = store.pointers
    assert first["a"] == second["a"]
    assert third.keys() == {"a", "c"}


@pytest.mark.parametrize("ask", ["start", "finished", "wait", "close"])
def test_an_error_in_the_background_is_raised_once_by_the_next_call(store, ask):
    store.directory.write_text("a file is in the way")
    saver = AsyncSaver(store)
    saver.start({"a": torch.ones(1)}, {}, step=1)
    store.gate.set()
    while not saver._in_flight[0].done():
        time.sleep(0.001)
    arguments = ({"a": torch.ones(1)}, {}, 2) if ask == "start" else ()
    with pytest.raises(CheckpointError, match=r"could not be written: File exists"):
        getattr(saver, ask)(*arguments)
    assert saver.finished() == []
    assert saver.wait() is None
    if ask != "close":
        store.directory.unlink()
        saver.start({"a": torch.ones(1)}, {}, step=3)
        assert saver.wait().step == 3
    saver.close()


def test_an_error_nobody_asked_for_is_a_warning_at_the_end(store):
    store.directory.write_text("a file is in the way")
    store.gate.set()

    def save_and_forget():
        AsyncSaver(store).start({"a": torch.ones(1)}, {}, step=1)
        gc.collect()

    with pytest.warns(UserWarning, match=r"the last checkpoint is missing: .* File exists"):
        save_and_forget()


def test_an_error_on_its_way_is_not_hidden_by_one_of_the_save(store):
    store.directory.write_text("a file is in the way")
    store.gate.set()

    def fail_while_saving():
        with AsyncSaver(store) as saver:
            saver.start({"a": torch.ones(1)}, {}, step=1)
            raise ZeroDivisionError

    with pytest.warns(UserWarning, match="the last checkpoint is missing"), pytest.raises(ZeroDivisionError):
        fail_while_saving()


def test_leaving_without_close_still_finishes_the_save(tmp_path):
    store = CheckpointStore(tmp_path)
    saver = AsyncSaver(store)
    saver.start({"a": torch.ones(100_000)}, {}, step=1)
    del saver
    gc.collect()
    assert [path.name for path in store.list_checkpoints()] == ["step-00000001"]
