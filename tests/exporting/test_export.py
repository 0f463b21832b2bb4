"""Trained models written for other tools, and loaded again."""

import os
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model as load_safetensors
from torch import nn

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.comm import LocalGroup
from paceline.errors import CheckpointError, SettingsError, StorageError
from paceline.exporting import export, load_model
from paceline.optim import SGD
from plain_functions import make_points_run, train_here
from training_models import Tied, make_batch, make_module, make_replica, run_one_step

RECIPE = "plain_functions:make_run"


def build_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def make_tokens():
    tokens = torch.arange(12 * 8).view(12, 8) % 17
    return torch.utils.data.TensorDataset(tokens, tokens.roll(-1, 1))


def gpt2_loss(model, batch):
    return nn.functional.cross_entropy(model(batch.inputs).logits.flatten(0, 1), batch.targets.flatten())


def test_a_tied_gpt2_is_loaded_by_the_transformers_library(tmp_path):
    transformers = pytest.importorskip("transformers")
    run = make_points_run(model=build_gpt2, data=make_tokens, loss=gpt2_loss, metrics=None, num_steps=2, global_batch=6)
    train_here(run, tmp_path / "run", 2, recipe=RECIPE)
    tokens = make_tokens().tensors[0]
    with torch.no_grad():
        expected = load_model(tmp_path / "run")(tokens).logits
        assert not torch.equal(expected, build_gpt2().eval()(tokens).logits)
        for name in ("hf", "model.safetensors", "model.pt"):
            export(tmp_path / "run", tmp_path / name)
        restored = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
        assert restored.lm_head.weight is restored.transformer.wte.weight
        assert torch.equal(restored(tokens).logits, expected)
        load_safetensors(fresh := build_gpt2().eval(), tmp_path / "model.safetensors")
        assert torch.equal(fresh(tokens).logits, expected)
        state = torch.load(tmp_path / "model.pt")
        (fresh := build_gpt2().eval()).load_state_dict(state)
        assert torch.equal(fresh(tokens).logits, expected)
    assert state["lm_head.weight"] is not None, "what is tied has all its names"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["lm_head.weight"] == "transformer.wte.weight"
        assert file.metadata()["step"] == "2"
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


class Countdown(nn.Module):
    """Its parameter goes down by 1 a step."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, inputs):
        return self.value.expand(len(inputs))


def fall(output, batch):
    return output.mean()


def distance(output, batch):
    return {"distance": (output.mean() + 2).abs()}


@pytest.fixture
def counted(tmp_path):
    """A run whose averages are -1, -1.5, -2.25, -3.125 after its steps, with the best checkpoint at step 3."""
    run = make_points_run(
        model=Countdown,
        loss=fall,
        metrics=distance,
        optimizer=SGD(learning_rate=1.0, momentum=0.0),
        schedule="constant",
        clip_norm=None,
        ema=0.5,
        num_steps=4,
        evaluate_interval=1,
        checkpoint_interval=1,
        keep_best="min:distance",
        sync="local_sgd",
    )
    train_here(run, tmp_path / "run", 2, recipe=RECIPE)
    return tmp_path / "run"


def test_moving_averages_are_what_is_exported_of_a_run_that_judges_them(counted, tmp_path):
    def value(**options):
        return float(load_model(counted, **options).value.detach())

    assert value() == -3.125
    assert value(averaged=False) == -4
    assert value(checkpoint="best") == -2.25
    assert value(checkpoint="2", averaged=True) == -1.5
    assert float(load_model(counted / "checkpoints" / "step-00000002").value.detach()) == -1.5
    export(counted, tmp_path / "best.pt", "best")
    assert torch.load(tmp_path / "best.pt")["value"] == -2.25
    with pytest.raises(CheckpointError, match=r"newest, best or a step, but got '7' for .*steps there are: 2, 3, 4$"):
        load_model(counted, "7")


@pytest.mark.parametrize("sync", ["every_step", "diloco"])
@pytest.mark.parametrize("averaged", [False, True])
def test_the_replica_of_ones_own_loop_is_exported_as_all_workers_stand_for_it(tmp_path, sync, averaged):
    path = tmp_path / "model.safetensors"

    def worker(group):
        replica = make_replica(make_module(), group, sync=sync, ema=0.5 if averaged else None)
        for step in range(3):
            run_one_step(replica, weight=12.0 + group.rank, scale=1.0 + step + group.rank)
        before = {name: tensor.clone() for name, tensor in replica.module.state_dict().items()}
        export(replica, path)
        assert all(torch.equal(tensor, before[name]) for name, tensor in replica.module.state_dict().items())
        with replica.averaged() if averaged else replica.consensus():
            expected = replica.module(make_batch()[0]).detach().clone()
        with pytest.raises((SettingsError, CheckpointError), match=r"must be new, but .*model\.safetensors exists"):
            export(replica, path)
        replica.close()
        return expected

    expected = LocalGroup.run(2, worker)
    load_safetensors(module := Tied(), path)
    assert module.head.weight is module.embedding.weight
    with torch.no_grad():
        assert torch.equal(module(make_batch()[0]), expected[0])


def test_nothing_is_overwritten_and_nothing_half_written_stays(counted, tmp_path):
    (tmp_path / "there.pt").write_text("mine")
    with pytest.raises(SettingsError, match=r"must be new, but .*there\.pt exists; remove it"):
        export(counted, tmp_path / "there.pt")
    assert (tmp_path / "there.pt").read_text() == "mine"
    for name in ("full.pt", "full.safetensors"):
        (tmp_path / f".{name}.{os.getpid()}.part").symlink_to("/dev/full")  # not torch's "iostream error"
        with pytest.raises(StorageError, match=rf"{name} could not be written: .*; (free space there|check the disk)"):
            export(counted, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there.pt"]


def save_document(folder, document):
    CheckpointStore(folder).save({"model/value": torch.zeros(())}, document, 1)


@pytest.mark.parametrize(
    ("document", "to", "error", "problem"),
    [
        ({"replica": {}}, "model.onnx", SettingsError, r"must end in \.safetensors, \.pt, \.pth or have no ending"),
        ({"replica": {}}, "folder", SettingsError, "is of a loop of your own; export a file of safetensors"),
        ({"replica0/replica": {}}, "model.pt", SettingsError, r"holds several; call paceline\.export\(replica"),
        ({"replica": {}, "run": {}}, "folder", CheckpointError, "is of an earlier version of Paceline; export a file"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_what_can(tmp_path, document, to, error, problem):
    save_document(tmp_path / "own", document)
    with pytest.raises(error, match=problem):
        export(tmp_path / "own", tmp_path / to)


def test_averages_and_a_best_that_are_not_there_are_refused(tmp_path):
    save_document(tmp_path / "own", {"replica": {}})
    with pytest.raises(SettingsError, match="moving averages must be in a checkpoint to be taken, but"):
        export(tmp_path / "own", tmp_path / "model.pt", averaged=True)
    with pytest.raises(CheckpointError, match="the best checkpoint must have been kept, but"):
        export(tmp_path / "own", tmp_path / "model.pt", "best")
    with pytest.raises(CheckpointError, match="must hold a checkpoint that is whole, but there is none"):
        export(tmp_path / "nowhere", tmp_path / "model.pt")


def test_a_model_without_save_pretrained_needs_a_file(counted, tmp_path):
    with pytest.raises(
        SettingsError, match=r"save_pretrained.*but got Countdown; give a file's name, such as .*\.safe"
    ):
        export(counted, tmp_path / "folder")


@pytest.mark.timeout(120)
def test_a_run_in_a_layout_is_exported_from_the_command_line(tmp_path, monkeypatch, run_here):
    """Whole, though each rank had half of every parameter."""
    monkeypatch.chdir(tmp_path)
    done = run_here(
        *("train", "transformer_lm", "--out", "run", "--layout.sharded", 2, "--num_steps", 2, "--evaluate_samples", 2),
        *("--model", "transformer_lm", "--model.width", 16, "--model.num_layers", 1, "--model.num_heads", 2),
        *("--data.max_bytes", 20_000, "--data.sequence_length", 8, "--loss.sample_tokens", 0, "--global_batch", 2),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    done = run_here("export", "run", "--to", "model.safetensors", "--checkpoint", 2)
    assert done.returncode == 0, done.stderr
    assert re.search(r"exported: model\.safetensors, the model of step 2 \(.*step-00000002\)", done.stdout)
    load_safetensors(module := load_model("run"), "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "run" / "checkpoints" / "step-00000002")
    state = module.state_dict()
    for name in checkpoint.list_tensors():
        if name.startswith("model/"):
            assert torch.equal(state[name.removeprefix("model/")], checkpoint.read(name)), name
    done = run_here("export", "run", "--to", "model.safetensors")
    assert done.returncode == 2
    assert "what is exported must be new, but model.safetensors exists" in " ".join(done.stderr.split())
