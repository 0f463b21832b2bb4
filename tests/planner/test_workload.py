"""What a trace of a model counts, against closed forms and the model itself."""

from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.cli.prepare import make_run
from paceline.errors import SettingsError
from paceline.planner import trace_workload, workload
from paceline.planner.digest import digest_workload
from paceline.simulator.training import TracedShape, answer_rows, describe, make_case, read_rows
from paceline.simulator.training.operators import Kind
from paceline.training.rehearsal import outline

EXAMPLES = Path(__file__).parents[2] / "examples"
ROW = {
    "id": "r", "device": "a100_80gb", "cluster": {"name": "dgx_a100"}, "num_ranks": 1, "micro_batch": 8,
    "global_batch": 64, "precision": "bf16", "is_compiled": False, "recompute": "none", "optimizer": "adamw",
}  # fmt: skip
SMALL_LM = [("model.width", "64"), ("model.num_layers", "2"), ("data.sequence_length", "64")]


def trace(recipe, *overrides, is_cached=False):
    run = make_run(str(recipe), list(overrides))
    splits = run.open_data()
    return trace_workload(run, splits, is_cached=is_cached), outline(run.model, splits)


def describe_row(model, **fields):
    model = model.model_dump(mode="json") if isinstance(model, TracedShape) else model
    return describe(
        make_case(read_rows({"version": 1, "rows": [{**ROW, "model": model, **fields}]}, "rows", measured=False)[0])
    )


def flops(description, *kinds):
    workload = description.workload
    parts = (workload.blocks, workload.head)
    return sum(
        f * c for p in parts for k, f, c in zip(p.kinds, p.flops, p.counts, strict=True) if not kinds or k in kinds
    )


def decoder(width, layers, inner, **fields):
    return {
        "name": "decoder", "num_layers": layers, "width": width, "num_heads": 4, "feedforward": inner,
        "vocabulary": 256, "is_gated": False, "is_tied": True, "positions": "learned", **fields,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "overrides", "model", "sample"),
    [
        ("transformer_lm", SMALL_LM, decoder(64, 2, 168, is_gated=True, positions="rotary"), {"tokens": 64}),
        pytest.param(
            EXAMPLES / "gpt2_run.py:run",
            [("model.arguments.width", "64"), ("model.arguments.num_layers", "2")],
            decoder(64, 2, 256),
            {"tokens": 128},
            marks=pytest.mark.slow,
        ),
        (
            EXAMPLES / "llama.py:run",
            [],
            decoder(64, 2, 192, num_kv_heads=2, is_gated=True, is_tied=False, positions="rotary"),
            {"tokens": 64},
        ),
        pytest.param(
            "resnet",
            [("model.width", "64"), ("data.size", "64")],
            {"name": "resnet", "depth": 18, "num_classes": 10},
            {"image": [1, 64, 64]},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("samples", [8, 12])
def test_a_trace_counts_the_flops_of_the_closed_form_and_the_parameters_of_the_model(
    traces, recipe, overrides, model, sample, samples
):
    shape, module = traces(recipe, *overrides)
    settled = {"sample": sample, "attention": shape.attention, "micro_batch": samples, "global_batch": samples}
    traced, closed = describe_row(shape, **settled), describe_row(model, **settled)
    assert flops(traced) == pytest.approx(flops(closed), rel=0.02)
    for kind in (Kind.MATRIX, Kind.CONVOLUTION, Kind.FUSED):
        assert flops(traced, kind) == pytest.approx(flops(closed, kind), rel=0.02)
    assert shape.num_parameters == sum(p.numel() for p in module.parameters())
    assert shape.uncounted == ()
    if shape.reads_tokens:
        assert traced.workload.boundary_elements == closed.workload.boundary_elements
        assert traced.workload.context_elements == closed.workload.context_elements


@pytest.fixture(scope="module")
def traces():
    """Return the trace and the outline of a recipe, each made once."""
    made = {}

    def find(recipe, *overrides):
        key = (str(recipe), overrides)
        made[key] = made.get(key) or trace(recipe, *overrides)
        return made[key]

    return find


def test_what_blocks_keep_is_what_their_operators_read_backward(traces):
    """Of a token: both norms' inputs and results, queries and keys as turned, the joined map's result, attention's
    result as it is and in the order of its projection; gate, its activation, the other map and their product; two
    numbers of each norm and one of each head's scores."""
    shape, _ = traces("transformer_lm", *SMALL_LM)
    width, hidden, heads, tokens = 64, 168, 4, 64
    of_block = tokens * (11 * width + 4 * hidden + heads + 4)
    fixed, each, shared_fixed, shared_each = shape.blocks[-1].kept_elements
    assert (fixed + shared_fixed, each + shared_each) == pytest.approx((0, of_block))
    found = describe_row(shape, precision="fp32").workload
    tables = 2 * tokens * 8  # cosines and sines, which all layers share
    assert found.kept_bytes == pytest.approx(4 * (2 * 8 * of_block + tables))
    assert found.kept_inputs_bytes == pytest.approx(4 * 2 * (8 * tokens * width + tables))
    products = 8 * tokens * (3 * width + width + heads + width + 2 * hidden + width)
    assert found.kept_selective_bytes == pytest.approx(4 * 2 * products)


def test_tensor_ranks_share_products_and_reduce_what_they_add_up(traces):
    shape, _ = traces("transformer_lm", *SMALL_LM)
    one, two = describe_row(shape), describe_row(shape, num_ranks=2, layout={"tensor": 2})
    assert flops(two) == pytest.approx(flops(one) / 2)
    assert shape.cuts_tokens
    assert shape.tensor_divisor == 4
    assert [block.reductions for block in shape.blocks] == [4.0, 4.0]
    assert one.workload.block_parameters - two.workload.block_parameters == pytest.approx(
        2 * (4 * 64 * 64 + 3 * 64 * 168) / 2
    )
    assert two.workload.kept_bytes < 0.6 * one.workload.kept_bytes
    # Both ends of a pipeline hold a tied embedding, and Llama's is not.
    assert sum(shape.ends.tied_parameters) == 256 * 64
    assert one.workload.tied_parameters == 2 * two.workload.tied_parameters
    foreign, _ = traces(EXAMPLES / "llama.py:run")
    assert sum(foreign.ends.tied_parameters) == 0
    # Each of the five maps that read the stream adds up its gradient for itself; two add up results.
    assert foreign.blocks[0].reductions == 7.0
    assert not foreign.cuts_tokens


def test_a_row_of_a_trace_is_priced_and_one_that_contradicts_it_is_refused(traces):
    shape, _ = traces("transformer_lm", *SMALL_LM)
    model = shape.model_dump(mode="json")
    model["blocks"][1]["count"] = 30
    rows = [
        {**ROW, "model": model},
        {**ROW, "model": model, "num_ranks": 8, "layout": {"data": 2, "tensor": 2, "pipeline": 2}},
        {**ROW, "model": model, "recompute": "selective"},
        {**ROW, "model": model, "sample": {"tokens": 128}},
        {**ROW, "model": model, "num_ranks": 8, "layout": {"tensor": 8}},
        {**ROW, "model": model, "attention": "eager"},
    ]
    answers = answer_rows(read_rows({"version": 1, "rows": rows}, "rows", measured=False))["rows"]
    assert all(answer["error"] is None for answer in answers[:3])
    assert answers[0]["step_s"] < answers[2]["step_s"]
    assert answers[0]["memory_bytes"] > answers[2]["memory_bytes"]
    for answer, words in zip(
        answers[3:], ("sample.tokens must be 64", "a multiple of layout.tensor", "attention must be"), strict=True
    ):
        assert words in answer["error"]


@torch.library.custom_op("planner_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda context, grad: grad * 2)


class Odd(nn.Module):
    """A kernel of one's own, and numbers of rows that depend on values."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for one in self.maps:
            x = twice(one(x))
        return x[x.sum(-1) > 0]


def build_odd():
    return Odd()


def make_numbers():
    pairs = [(torch.randn(8), torch.tensor(0.0)) for _ in range(8)]
    return pairs, pairs


def mean_square(output, batch):
    return output.square().mean()


def make_odd():
    return paceline.Run(model=build_odd, data=make_numbers, loss=mean_square, global_batch=4, num_steps=2)


def test_what_cannot_be_counted_is_named():
    run = make_odd()
    shape = trace_workload(run, run.open_data(), is_cached=False)
    assert "flops of planner_test::twice" in shape.uncounted
    assert any("aten::index" in words and "largest" in words for words in shape.uncounted)
    assert shape.num_blocks == 2
    found = answer_rows(
        read_rows({"version": 1, "rows": [{**ROW, "model": shape.model_dump(mode="json")}]}, "rows", measured=False)
    )
    assert "model: flops of planner_test::twice" in found["rows"][0]["assumed"]


def test_a_trace_is_made_once_for_the_same_model_and_anew_for_another(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = make_odd()
    first = trace_workload(run, run.open_data())
    monkeypatch.setattr(workload, "fit_places", lambda *_: pytest.fail("it was traced again"))
    assert trace_workload(run, run.open_data()) == first
    longer = run.model_copy(update={"num_steps": 7})
    assert trace_workload(longer, longer.open_data()) == first  # so that a profile tells of more steps too
    other = run.model_copy(update={"loss": make_odd().loss, "seed": 1})
    with pytest.raises(pytest.fail.Exception, match="traced again"):
        trace_workload(other, other.open_data())
    (tmp_path / "paceline/traces" / f"{first.digest}.json").write_text("{}")
    with pytest.raises(pytest.fail.Exception, match="traced again"):
        trace_workload(run, run.open_data())


def test_steps_matter_to_a_trace_where_the_model_grows():
    settings = ([*SMALL_LM, ("growth.steps", "[2]"), ("num_steps", number)] for number in ("3", "4"))
    runs = [make_run("transformer_lm", one) for one in settings]
    assert len({digest_workload(run, run.open_data(), nn.Linear(1, 1), on_cpu=True) for run in runs}) == 2


def test_a_shape_that_is_no_model_is_refused():
    with pytest.raises(SettingsError, match="blocks"):
        describe_row({"name": "traced", "title": "none", "blocks": [], "ends": {}})
