"""Models that nobody here wrote on a tensor axis without a plan: exact, or refused with the block's name."""

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign_models import MODELS, logits_of, make
from torch import Tensor, nn

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.comm import join
from paceline.comm.group import Group
from paceline.comm.local_group import LocalGroup
from paceline.errors import SettingsError
from paceline.parallel.parallelize import find_shard, parallelize
from paceline.parallel.tensor import full_tensor
from paceline.parallel.tensor_derivation import find_plan
from paceline.parallel.tensor_styles import STYLES, is_linear
from paceline.replica.replica import Replica
from paceline.replica.state import capture, restore
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout

NUM_STEPS = 10
FEW_STEPS = 2
"""Number of steps of models that share all but their styles with another."""
TOLERANCE = 1e-9  # ten steps in float64
TENSOR = Layout(tensor=2)
ALONE = Layout()


def first_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value[:1] for key, value in inputs.items()}


def train(name: str, group: Group, layout: Layout, start: Checkpoint | None = None) -> Any:
    """Clipped steps of two micro-batches: losses and norms, and the whole state."""
    num_steps = FEW_STEPS if start is not None or name in ("llama with one key", "shaped") else NUM_STEPS
    model, inputs = make(name)
    module = parallelize(model, layout, group=group, sample=first_of(inputs))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
    replica = Replica(module, optimizer, group=group, clip_norm=0.5, hash_interval=1)
    restore(start, replica)
    numbers = []
    for step, sample in itertools.product(range(num_steps), range(2)):
        taken = {key: value[sample : sample + 1] for key, value in inputs.items()}
        if "input_ids" in taken:
            taken["input_ids"] = (taken["input_ids"] + step) % 48
        with replica.shard.forward_context():
            logits = logits_of(replica(**taken))
            targets = (torch.arange(logits[..., 0].numel()) * 7 + step) % logits.shape[-1]
            replica.backward(F.cross_entropy(logits.flatten(0, -2), targets), weight=1.0, last=sample == 1)
        if sample == 1:
            result = replica.update()
            numbers += [result.loss, result.gradient_norm]
    tensors, document = capture(replica)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    replica.close()
    return numbers, tensors, document


def distance(one: Any, other: Any) -> float:
    names = [name for name in other[1] if name.startswith(("model/", "optimizer/"))]
    assert all(name in one[1] for name in names)
    tensors = [float((one[1][name] - other[1][name]).abs().max()) for name in names]
    return max(*tensors, *(abs(a - b) for a, b in zip(one[0], other[0], strict=True)))


def compare(folder: str) -> dict[str, Any]:
    """Return how far each model is from one process's, and one that goes on from a checkpoint of one."""
    group = join()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for name in MODELS:
        split = train(name, group, TENSOR)
        if group.rank == 0:
            whole = train(name, LocalGroup(), ALONE)
            result[name] = [distance(split, whole), abs(whole[0][0] - whole[0][-2])]
    _, tensors, document = train("gpt2", LocalGroup(), ALONE)
    path = CheckpointStore(Path(folder) / str(group.rank), keep=None).save(tensors, document, 1).path
    split = train("gpt2", group, TENSOR, Checkpoint.open(path))
    if group.rank == 0:
        result["loaded"] = [distance(split, train("gpt2", LocalGroup(), ALONE, Checkpoint.open(path))), 1.0]
    group.close()
    return result


@pytest.mark.timeout(150)
def test_foreign_models_train_as_in_one_process_without_a_plan(tmp_path: Path) -> None:
    results = run_processes(2, compare, {"folder": str(tmp_path)}, timeout_s=120)

    check_exits(results)
    assert results[0].value.keys() == {*MODELS, "loaded"}
    for name, (difference, progress) in results[0].value.items():
        assert difference < TOLERANCE, name
        assert progress > 1e-3, name


def plan_of(name: str, size: int = 2) -> Any:
    model, inputs = make(name)
    return find_plan(model.eval(), None, size, first_of(inputs))


def test_plans_are_read_from_the_model_or_proved() -> None:
    gpt2 = plan_of("gpt2")
    assert gpt2.styles["transformer.h.1.attn.c_attn"] == "columns:3"
    assert gpt2.styles["transformer.h.1.mlp.c_proj"] == "rows"
    assert gpt2.attributes["transformer.h.1.attn"] == {"split_size": 8}
    llama = plan_of("llama")
    assert llama.styles["model.layers.1.self_attn.k_proj"] == "columns"
    assert (llama.styles["model.embed_tokens"], llama.styles["lm_head"]) == ("vocabulary", "gathered_columns")
    assert plan_of("bert").styles["bert.encoder.layer.1.attention.output.dense"] == "rows"
    assert plan_of("vit").styles["vit.layers.1.attention.q_proj"] == "columns"
    fused = plan_of("fused")
    assert fused.styles["layers.1.attention.qkv"] == "columns:3"
    assert fused.styles["layers.1.scale"] == "partial"
    assert fused.attributes["layers.0.attention"] == {"num_heads": 2}
    assert plan_of("torch").styles["encoder.layers.1.self_attn"] == "heads"


@pytest.mark.parametrize(("name", "size"), [("shaped", 2), ("llama with one key", 2), ("llama", 4)])
def test_heads_that_cannot_be_shared_out_leave_attention_whole_but_not_its_matrices(name: str, size: int) -> None:
    styles = plan_of(name, size).styles
    first, last = (
        ("attention.qkv", "attention.project") if name == "shaped" else ("self_attn.k_proj", "self_attn.o_proj")
    )
    assert {style for module, style in styles.items() if module.endswith(first)} == {"gathered_columns"}
    assert {style for module, style in styles.items() if module.endswith(last)} == {"sliced_rows"}


def test_a_model_with_nothing_to_share_is_refused_with_the_line_that_says_how() -> None:
    twice = nn.Linear(4, 4)
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Flatten(), twice, twice)
    with pytest.raises(SettingsError, match=r"has the linear maps 2 \(4 to 4\); say how it is split") as raised:
        find_plan(model.eval(), None, 2, torch.randn(1, 2, 2))
    assert '--tensor_plan \'{"2": "gathered_columns"}\'' in str(raised.value)


class Stateful(nn.Module):
    """Buffers, dropout, and parameters of equal elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 6)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class Training(nn.Module):
    """What only training does: a norm over the width, or noise."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        if self.training:
            h = h / (1 + h.norm(dim=-1, keepdim=True)) if self.kind == "norm" else h + torch.rand_like(h)
        return self.last(h)


def say(group: Group, model: nn.Module, inputs: Any, plan: dict[str, str] | None) -> str:
    """Return what is refused; otherwise, whether the split model's gradients are the whole one's."""
    whole = copy.deepcopy(model)
    try:
        part = parallelize(model, TENSOR, group=group, sample=inputs, tensor_plan=plan)
    except SettingsError as error:
        return f"refused: {error}"
    for one in (whole, part):
        logits_of(one(**inputs) if isinstance(inputs, dict) else one(inputs)).sin().sum().backward()
    worst = 0.0
    for (name, one), other in zip(whole.named_parameters(), part.parameters(), strict=True):
        if one.grad is not None:
            given = full_tensor(other.grad) if other.grad is not None else torch.zeros_like(one)
            worst = max(worst, float((given - one.grad).norm() / max(float(one.grad.norm()), 1e-6)))
            assert not given.isnan().any(), name
    find_shard(part, group).close()
    return "exact" if worst < 1e-6 else f"wrong: {worst}"


def mutate(model: nn.Module, plan: dict[str, str], number: int) -> dict[str, str]:
    """Return a plan with one thing wrong."""
    draw = random.Random(number)
    mutant, names = dict(plan), sorted(plan)
    one, two = draw.sample(names, 2)
    match number % 6:
        case 0:
            mutant[one] = {"rows": "columns", "sliced_rows": "columns"}.get(mutant[one], "rows")
        case 1:
            del mutant[one]
        case 2:
            mutant[one] = draw.choice(["columns", "columns:2", "columns:3", "gathered_columns"])
        case 3:
            mutant[draw.choice([name for name, part in model.named_modules() if is_linear(part)])] = mutant.pop(one)
        case 4:
            mutant[draw.choice([name for name, _ in model.named_modules() if name])] = draw.choice(STYLES)
        case _:
            mutant[one], mutant[two] = mutant[two], mutant[one]
    return mutant


def run_mutants(names: list[str], numbers: list[int]) -> list[list[str]]:
    """Return what becomes of mutants of the right plans."""
    group = join()
    torch.set_num_threads(1)
    found = []
    for name, number in itertools.product(names, numbers):
        model, inputs = make(name)
        plan = dict(find_plan(model.eval(), None, 2, first_of(inputs)).styles)
        mutant = mutate(model, plan, number)
        what = "the same" if mutant == plan else say(group, model, first_of(inputs), mutant)
        found.append([name, str(set(mutant.items()) ^ set(plan.items())), what])
    group.close()
    return found


def refuse() -> dict[str, str]:
    """Return what is said of plans, and what is left of a model that passed."""
    group = join()
    torch.set_num_threads(1)
    torch.manual_seed(1)  # neither half of the hidden units is zero
    plan, rows = {"first": "columns", "last": "rows"}, torch.ones(2, 6)
    trained = {
        "training": say(group, Training("norm"), rows, plan),
        "noise": say(group, Training("noise").eval(), rows, plan),
    }
    model, inputs = make("fused")
    blocks = {"*.expand": "columns", "*.shrink": "rows"}
    result = trained | {
        "joined": say(group, copy.deepcopy(model), inputs, {"*.qkv": "columns", "*.project": "rows"}),
        "partial": say(group, copy.deepcopy(model), inputs, blocks),
        "right": say(group, copy.deepcopy(model), inputs, {**blocks, "*.scale": "partial"}),
        "half": say(group, copy.deepcopy(model), inputs, {"layers.1.expand": "columns"}),
        "sample": say(group, copy.deepcopy(model), {}, None),
        "inputs": say(group, copy.deepcopy(model), {"tokens": inputs["input_ids"]}, None),
    }
    llama, tokens = make("llama with one key")
    attention = {"*.q_proj": "columns", "*.k_proj": "columns", "*.v_proj": "columns", "*.o_proj": "rows"}
    result["keys"] = say(group, llama, tokens, attention)
    torch.manual_seed(3)
    stateful = Stateful()
    before = {name: tensor.clone() for name, tensor in stateful.state_dict().items()}
    state = torch.get_rng_state()
    part = parallelize(
        stateful, TENSOR, group=group, sample=torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    )
    same = [torch.equal(full_tensor(tensor), before[name]) for name, tensor in part.state_dict().items()]
    same += [torch.equal(torch.get_rng_state(), state), part.drop.training, next(part.parameters()).grad is None]
    result["restored"] = str(all(same))
    find_shard(part, group).close()
    for layer in model.layers:
        nn.init.zeros_(layer.attention.project.weight)
        nn.init.zeros_(layer.attention.project.bias)
    result["zeros"] = say(group, model, inputs, {"*.qkv": "columns", "*.project": "rows"})
    group.close()
    return result


@pytest.mark.timeout(150)
def test_plans_that_compute_something_else_are_refused_by_name() -> None:
    results = run_processes(2, refuse, timeout_s=100)

    check_exits(results)
    said = results[0].value
    assert said == results[1].value
    assert "layers.0.attention.project (Linear) returns values that differ by" in said["joined"]
    assert "a matrix that joins queries, keys and values is 'columns:3'" in said["joined"]
    assert "has a gradient of layers.1.scale." in said["partial"]
    assert "name layers.1.scale with style 'partial'" in said["partial"]
    assert said["right"] == "exact"
    assert "but layers.1.scale" in said["half"] or "but layers.1.shrink (Linear) fails on a rank's part" in said["half"]
    assert "sample must be inputs of at least one sample for a tensor or expert axis" in said["sample"]
    assert "must run on the sample" in said["inputs"]
    assert "but model.layers.0.self_attn" in said["keys"]
    assert "num_key_value_heads(1) must be a multiple of tensor(2) to share heads out" in said["keys"]
    assert "whose maps first, last" in said["training"]
    assert "'gathered_columns' and 'sliced_rows' instead of columns and rows" in said["training"]
    assert said["noise"] == "exact"  # it can be compared in evaluation only
    assert said["restored"] == "True"
    assert "layers.0.attention.project (Linear) returns values that differ by" in said["zeros"]


@pytest.mark.timeout(150)
def test_mutants_of_plans_are_refused_or_exact() -> None:
    results = run_processes(2, run_mutants, {"names": ["gpt2", "fused"], "numbers": list(range(6))}, timeout_s=100)

    check_exits(results)
    said = [what for _, _, what in results[0].value]
    assert all(what.startswith(("refused", "exact", "the same")) for what in said), said
    assert sum(what.startswith("refused: a split model must compute") for what in said) > 5
