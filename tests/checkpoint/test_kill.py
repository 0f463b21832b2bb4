import multiprocessing
import random

import pytest
import torch

from paceline.checkpoint import CheckpointStore

NAMES = [f"t{index}" for index in range(8)]


def resume_and_save_until_killed(directory, incremental, sender):
    store = CheckpointStore(directory, keep=2, incremental=incremental)
    checkpoint = store.find_newest_valid(lambda path, why: None)
    step = checkpoint.step if checkpoint else 0
    while True:
        step += 1
        tensors = {name: torch.full((30_000,), float(step)) for name in NAMES}
        store.save(tensors | {"frozen": torch.zeros(30_000)}, {"step": step}, step)
        sender.send(step)


def drain(receiver):
    """Return the last step that was said to be saved."""
    last = 0
    while receiver.poll():
        try:
            last = receiver.recv()
        except EOFError:
            break
    return last


@pytest.mark.parametrize("incremental", [0, 3])
def test_sigkill_at_random_instants_of_saving(tmp_path, incremental):
    """One run, killed and resumed ten times: no finished save is lost, no unfinished one taken for whole."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.checkpoint"])
    generator = random.Random(0)
    num_unfinished = 0
    newest = 0
    for _ in range(10):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=resume_and_save_until_killed, args=(tmp_path, incremental, sender))
        process.start()
        sender.close()
        assert receiver.poll(30)  # it has begun
        process.join(generator.uniform(0, 0.05))
        process.kill()
        process.join()
        last = drain(receiver)
        receiver.close()

        reasons = []
        store = CheckpointStore(tmp_path)
        checkpoint = store.find_newest_valid(lambda path, why, reasons=reasons: reasons.append(why))
        assert set(reasons) <= {"it was never finished"}
        assert checkpoint.step >= last > newest
        tensors = {name: torch.zeros(30_000) for name in NAMES}
        checkpoint.load(tensors, strict=False)
        checkpoint.verify()
        assert all((tensor == checkpoint.step).all() for tensor in tensors.values())
        assert checkpoint.read_document() == {"step": checkpoint.step}
        newest = checkpoint.step
        num_unfinished += len(reasons)
    assert num_unfinished > 0  # some kills did hit a save
