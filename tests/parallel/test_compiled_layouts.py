"""Blocks that are compiled after they were laid out learn what they did before."""

from typing import Any

import pytest
import test_layouts
import torch
from test_layouts import LOSS_TOLERANCE, NUM_TOKENS, PARAMETER_TOLERANCE, train

from paceline.comm import join
from paceline.data.base import Spec
from paceline.recipes.transformer_lm import TransformerLM
from paceline.testing.processes import check_exits, run_processes
from paceline.training.compiling import compile_blocks

LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"context": 2},
    {"sharded": 2, "zero_stage": 3},
    {"pipeline": 2, "order": "interleaved"},
    {"expert": 2},
]


def make_mixture() -> torch.nn.Module:
    torch.manual_seed(0)
    settings = TransformerLM(width=16, num_layers=2, num_heads=4, num_experts=4, capacity_factor=1.0)
    return settings.build(Spec(num_classes=32, input_shape=(NUM_TOKENS,)))


def compare_compiled(layouts: list[dict[str, Any]]) -> list[list[float]]:
    """Return, for each layout, how far losses and parameters of compiled blocks are from those that are not."""
    parallelize = test_layouts.parallelize

    def parallelize_and_compile(*arguments: Any, **options: Any) -> torch.nn.Module:
        module = parallelize(*arguments, **options)
        compile_blocks(module, "aot_eager")
        return module

    group = join()
    torch.set_num_threads(1)
    differences = []
    for layout in layouts:
        if "expert" in layout:
            test_layouts.make_model = make_mixture
        test_layouts.parallelize = parallelize
        losses, tensors = train(group, layout, 1, num_steps=3)
        test_layouts.parallelize = parallelize_and_compile
        torch._dynamo.utils.counters.clear()
        compiled_losses, compiled = train(group, layout, 1, num_steps=3)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "something was compiled"
        loss = max(abs(a - b) for a, b in zip(compiled_losses, losses, strict=True))
        distances = [float((compiled[name] - tensor).abs().max()) for name, tensor in tensors.items()]
        differences.append([loss, max(distances, default=0.0)])
    group.close()
    return differences


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_compiled_blocks_learn_the_same_in_every_layout() -> None:
    results = run_processes(2, compare_compiled, {"layouts": LAYOUTS}, timeout_s=100)
    check_exits(results)
    for result in results:
        for layout, (loss, parameter) in zip(LAYOUTS, result.value, strict=True):
            assert loss < LOSS_TOLERANCE, layout
            assert parameter < PARAMETER_TOLERANCE, layout
