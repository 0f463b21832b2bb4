"""`bench throughput` and `bench memory`: both run for real, small."""

import pytest

from paceline.benchmarks import MemoryBenchmark, ThroughputBenchmark, Workers
from paceline.benchmarks.memory import LAYOUTS, LAYOUTS_OF_EIGHT, TECHNIQUES
from paceline.errors import UnknownNameError
from paceline.recipes.transformer_lm import TransformerLM

SMALL = TransformerLM(width=16, num_layers=2, num_heads=2)


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "peak_flops"), [(1, None), (2, 1e6)])
def test_tokens_and_utilisation_stand_beside_a_plain_loop(num_workers, peak_flops):
    bench = ThroughputBenchmark(
        model=SMALL,
        sequence_length=8,
        batch=2,
        compiler="aot_eager",
        num_pairs=4,
        peak_flops=peak_flops,
        workers=Workers(num_workers=num_workers),
    )
    tokens, *utilisation = bench.measure()
    assert tokens.metric == "tokens"
    assert tokens.ours > 0
    assert f"{num_workers} x CPU thread" in tokens.case
    assert len(utilisation) == (peak_flops is not None), "nobody knows the peak of this device"
    for mfu in utilisation:
        num_parameters = sum(p.numel() for p in SMALL.build(bench.spec).parameters())
        of_token = 6 * num_parameters + 12 * 2 * 16 * 8
        assert mfu.ours == pytest.approx(100 * tokens.ours * of_token / (peak_flops * num_workers))
        assert mfu.ratio == pytest.approx(tokens.ratio)


def test_the_peak_is_of_the_whole_word_and_of_half_precision():
    def find_peak(name, precision="bf16"):
        return ThroughputBenchmark(precision=precision)._find_peak(name)

    assert find_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert find_peak("NVIDIA H100 PCIe") < find_peak("NVIDIA H100 80GB HBM3") == find_peak("NVIDIA H200")
    assert find_peak("NVIDIA A10G") is find_peak("CPU thread") is find_peak("NVIDIA A100", "fp32") is None


@pytest.mark.slow
def test_memory_stands_beside_its_estimate():
    names = ("none", "recompute full", "zero 3", "offload optimizer")
    rows = MemoryBenchmark(model=SMALL, global_batch=4, techniques=names).measure()
    by_name = {row.case: row for row in rows if row.metric == "peak memory"}
    assert list(by_name) == ["none", "recompute full", "zero 3"], "offloading needs a GPU"
    assert by_name["recompute full"].ours < by_name["none"].ours
    assert by_name["none"].ratio == pytest.approx(1, abs=0.1)


def test_every_technique_is_a_run_of_its_own():
    runs = [MemoryBenchmark().make_run(name) for name in TECHNIQUES | LAYOUTS | LAYOUTS_OF_EIGHT]
    assert len({run.model_dump_json() for run in runs}) == len(runs)
    with pytest.raises(UnknownNameError, match="technique must be a known name, but got 'magic'"):
        MemoryBenchmark(techniques=("magic",)).measure()


def test_what_a_process_needs_beside_tensors_stands_below():
    rows = MemoryBenchmark(model=SMALL, global_batch=4, techniques=("zero 3",)).measure()
    assert [row.metric for row in rows] == ["peak memory", "beside tensors"]
    assert 50 < rows[1].ours < 2000  # MB, of Python and torch
