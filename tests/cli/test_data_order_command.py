import re


def test_orders_of_a_recipes_data_are_compared(run_here):
    done = run_here(
        "data", "order", "rnn", "--order", "windows", "--order.window", 3, "--order.shard_samples", 50, "--seed", 1
    )
    assert done.returncode == 0, done.stderr
    assert "1,617 samples in 33 shards of 49 to 49" in done.stdout
    rows = dict(re.findall(r"^  (\w+(?: \d+)?) +[\d,]+ +(-?[\d.]+)", done.stdout, flags=re.MULTILINE))
    assert list(rows) == ["sequential", *(f"windows {window}" for window in (1, 2, 3, 4, 8, 16, 32)), "full"]
    assert float(rows["sequential"]) > 0.5 > float(rows["windows 3"]) > 0.02 > float(rows["full"])
    assert re.search(r"windows 3 .*<- this run", done.stdout)


def test_data_without_labels_have_places_alone(run_here):
    done = run_here("data", "order", "transformer_lm", "--data.max_bytes", 200000)
    assert done.returncode == 0, done.stderr
    assert "in 1 shards" in done.stdout
    assert "labels" not in done.stdout


def test_help_says_what_is_compared(run_here):
    done = run_here("data", "--help")
    assert done.returncode == 0
    assert "order" in done.stdout
