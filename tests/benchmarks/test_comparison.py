import statistics

import pytest

from paceline.benchmarks import COMPARISONS
from paceline.benchmarks.comparison import choose_codecs, choose_rules, compare_means
from paceline.cli.prepare import make_run
from paceline.compression import Codec
from paceline.errors import SettingsError, UnknownNameError
from paceline.registry import list_variants
from paceline.sync import EveryStep, Rule


@pytest.mark.parametrize("choose", COMPARISONS.values(), ids=COMPARISONS)
def test_the_reference_comes_first_and_each_way_once(choose):
    reference, *others = choose(None)

    def names(*given):
        return list(choose(given))

    assert names() == [reference]
    assert names(others[1], others[0], others[1]) == [reference, others[1], others[0]]
    assert names(others[0], reference) == [reference, others[0]]
    with pytest.raises(UnknownNameError, match="each of --only must be a known name, but got 'nothing'"):
        names(reference, "nothing")


@pytest.mark.parametrize("choose", COMPARISONS.values(), ids=COMPARISONS)
def test_every_way_is_a_run_of_its_own(choose):
    runs = [make_run("resnet", overrides).model_dump_json() for overrides in choose(None).values()]
    assert len(set(runs)) == len(runs)


def test_each_rule_and_each_codec_of_the_registry_is_what_its_name_alone_gives():
    rules = choose_rules(None)
    assert set(list_variants(Rule)) | {"diloco int8", "streaming_diloco int8"} == set(rules)
    for name, overrides in rules.items():
        rule, _, codec = name.partition(" ")
        given = ["--sync", rule, *(["--sync.codec", codec] if codec else [])]
        assert overrides == list(zip([word.removeprefix("--") for word in given[::2]], given[1::2], strict=True))
    assert set(choose_codecs(None)) == set(list_variants(Codec))
    assert all(overrides == [("sync.codec", name)] for name, overrides in choose_codecs(None).items())


def test_the_reference_is_synchronous_whatever_the_run_has():
    overrides = [("sync", "diloco"), *choose_rules([])["every_step"]]
    assert make_run("transformer_lm", overrides).sync == EveryStep()


def test_hosts_of_one_worker_are_told_to_rules_that_would_look_for_them():
    ways = choose_rules(None, host_size=1)
    assert ways["hierarchical_local_sgd"] == [("sync", "hierarchical_local_sgd"), ("sync.host_size", "1")]
    assert {**ways, "hierarchical_local_sgd": None} == {**choose_rules(None), "hierarchical_local_sgd": None}


def test_a_rule_may_have_a_codec():
    assert choose_rules(["local_sgd top_k"])["local_sgd top_k"] == [("sync", "local_sgd"), ("sync.codec", "top_k")]
    with pytest.raises(UnknownNameError, match="the codec in each of --only must be a known name, but got 'gzip'"):
        choose_rules(["local_sgd gzip"])
    with pytest.raises(SettingsError, match="must be a rule that takes a codec, but got 'dpsgd int8'; leave int8 out"):
        choose_rules(["dpsgd int8"])


def test_the_interval_takes_seeds_in_pairs():
    # 12.6 to 12. Each of three seeds is drawn thrice in 1 of 27 draws: these, at 1 and 1.1, are beyond the bounds; next
    # come the second seed twice with the first, 10.2 to 10, and the first twice with the last, 10.8 to 10.
    ratio = compare_means([2.2, 4.0, 6.4], [2.0, 4.0, 6.0])
    assert (ratio.ratio, ratio.lower, ratio.upper) == pytest.approx((1.05, 1.02, 1.08))
    scaled = compare_means([1.1 * (2.0 + seed) for seed in range(20)], [2.0 + seed for seed in range(20)])
    assert (scaled.lower, scaled.upper) == pytest.approx((1.1, 1.1)), (
        "losses that differ as much for both leave no doubt"
    )


def test_the_interval_narrows_with_seeds():
    reference = [2.0 + seed for seed in range(20)]
    errors = [0.5 * (-1) ** seed for seed in range(20)]
    ratio = compare_means([loss + error for loss, error in zip(reference, errors, strict=True)], reference)
    # The mean of 20 such errors spreads by 0.5 / sqrt(20), and 1.645 of it is each side, within a tenth of that.
    expected = 2 * 1.645 * 0.5 / 20**0.5 / statistics.mean(reference)
    assert ratio.upper - ratio.lower == pytest.approx(expected, rel=0.1)


def test_one_seed_has_no_interval():
    ratio = compare_means([2.0], [1.0])
    assert (ratio.ratio, ratio.lower, ratio.upper) == (2.0, None, None)
