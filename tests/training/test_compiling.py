"""Compiled blocks learn what they did before, and what cannot be compiled is refused."""

import copy

import pytest
import torch

from paceline.cli.prepare import make_run
from paceline.comm import LocalGroup
from paceline.data.base import Spec
from paceline.errors import SettingsError, UnknownNameError
from paceline.parallel.fully_sharded import find_blocks
from paceline.recipes.transformer_lm import TransformerLM
from paceline.replica import Replica
from paceline.training import compiling
from paceline.training.compiling import check_compiler, compile_blocks

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("default:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def learn(module, compiler=None, num_steps=3):
    """Return the losses of a few steps, of batches of two sizes."""
    if compiler is not None:
        compile_blocks(module, compiler)
    replica = Replica(
        module, torch.optim.AdamW(module.parameters(), lr=1e-2), group=LocalGroup(), clip_norm=1.0, bucket_bytes=4000
    )
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(num_steps):
        tokens = torch.randint(32, (3 + step % 2, 9), generator=generator)
        logits = replica(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), tokens[:, 1:].flatten())
        replica.backward(loss, weight=float(len(tokens)))
        losses.append(replica.update().loss)
    replica.close()
    return losses


@pytest.fixture
def graphs():
    """Register a backend that notes what it compiles, and return its notes."""
    torch.compiler.reset()
    compiled = []

    def note(graph, inputs):
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.register_backend(note, name="noting")
    yield compiled
    torch._dynamo.backends.registry._COMPILER_FNS.pop("noting")
    torch.compiler.reset()


def test_each_block_is_compiled_and_learns_the_same(graphs):
    torch.manual_seed(0)
    plain = TransformerLM(width=16, num_layers=3, num_heads=2).build(Spec(32, (8,)))
    compiled = copy.deepcopy(plain)
    losses = learn(plain)
    assert learn(compiled, "noting") == pytest.approx(losses, rel=1e-5)
    assert len(find_blocks(plain)) == 3
    assert graphs, "something was compiled"
    assert losses[-1] < losses[0]
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for name, parameter in compiled.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=1e-4, atol=1e-5)


def test_a_model_without_blocks_is_compiled_whole(graphs):
    module = torch.nn.Linear(3, 2)
    inputs = torch.ones(4, 3)
    before = module(inputs)
    compile_blocks(module, "noting")
    torch.testing.assert_close(module(inputs), before)
    assert len(graphs) == 1


@pytest.mark.slow
def test_a_run_is_compiled_from_the_command_line(tmp_path, run_here):
    small = (
        "--model.width 16 --model.num_layers 1 --model.num_heads 2 --data.sequence_length 16 --data.max_bytes 100000"
    )
    short = "--num_steps 3 --global_batch 4 --evaluate_samples 4 --loss.sample_tokens 0 --num_threads 1"
    out = ["--out", tmp_path / "run", "--schedule.warmup_steps", 1]
    done = run_here("train", "transformer_lm", "--compiler", "aot_eager", *small.split(), *short.split(), *out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"compiler": "aot_eager"' in (tmp_path / "run" / "run.json").read_text()
    done = run_here("train", "transformer_lm", "--compiler", "inductr", "--out", tmp_path / "other")
    assert done.returncode == 2
    assert "did you mean 'inductor'?" in done.stderr
    assert not (tmp_path / "other").exists()


def test_what_cannot_compile_is_refused(monkeypatch):
    check_compiler("none", CPU)
    with pytest.raises(UnknownNameError, match="compiler must be a known name, but got 'gcc'"):
        check_compiler("gcc", CPU)
    monkeypatch.setattr(compiling, "_has_cpp_compiler", lambda: False)
    with pytest.raises(SettingsError, match=r"must have a C\+\+ compiler on CPUs, but there is none; install g\+\+"):
        check_compiler("inductor", CPU)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="must have triton on GPUs"):
        check_compiler("inductor", torch.device("cuda"))
    landing = [("landing", "next_forward"), ("clip_norm", "none")]
    with pytest.raises(SettingsError, match="landing must be update, but got next_forward with a compiled model"):
        make_run("transformer_lm", [("compiler", "inductor"), *landing])
    pipeline = [("layout.pipeline", "2"), ("pipeline.order", "zero_bubble")]
    with pytest.raises(SettingsError, match="order must not split backward with compiled blocks"):
        make_run("transformer_lm", [("compiler", "inductor"), *pipeline])
