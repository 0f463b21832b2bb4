from paceline.benchmarks import VirtualWorkersBenchmark
from paceline.recipes.transformer_lm import TransformerLM


def test_weights_do_not_differ_with_virtual_workers():
    model = TransformerLM(width=16, num_layers=1, num_heads=2, dropout=0.0)
    bench = VirtualWorkersBenchmark(model=model, num_virtual_workers=6, num_workers=(1, 3), num_steps=8)
    rows = {(row.case[0], row.metric): row for row in bench.measure()}
    assert rows["3", "difference of weights from 1 worker's"].ours == 0
    assert rows["3", "difference of weights from 1 worker's"].reference > 0
    assert rows["3", "bytes sent"].ratio == 1  # two virtual workers each are one branch
    assert rows["1", "step time"].ratio > 0
