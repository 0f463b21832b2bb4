"""The help of commands lists the settings of what they are about."""

import pytest
from typer.testing import CliRunner

from paceline.benchmarks import list_benchmarks
from paceline.benchmarks.gossip_comparison import GossipComparison
from paceline.cli.describe import describe_settings, describe_type
from paceline.cli.main import app
from paceline.recipes import find_recipe
from paceline.sync import DiLoCo
from paceline.topology import BytesPerSecond


def help_of(*arguments):
    """Return what follows the command's own help."""
    result = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    own, separator, settings = result.output.partition("\n--")
    assert "Usage:" in own
    return separator + settings


def expected_of(settings):
    lines = []
    for row in describe_settings(settings):
        lines += [f"--{row.path} <{row.type}> [{row.value}]", *([f"    {row.meaning}"] if row.meaning else [])]
    return lines


def squeeze(text):
    return " ".join(text.split())


@pytest.mark.parametrize("name", list_benchmarks())
def test_the_help_of_a_benchmark_lists_its_settings(name):
    shown = squeeze(help_of("bench", name))
    settings = list_benchmarks()[name]()
    assert {row.path.partition(".")[0] for row in describe_settings(settings)} == set(type(settings).model_fields)
    assert shown == squeeze("\n".join(expected_of(settings)))


@pytest.mark.parametrize(
    "command",
    [("train", "resnet"), ("memory", "resnet"), ("compare", "codecs", "resnet"), ("compare", "sync")],
    ids=" ".join,
)
def test_the_help_of_a_recipe_lists_its_settings(command):
    assert squeeze(help_of(*command)) == squeeze("\n".join(expected_of(find_recipe("resnet")())))


def test_type_default_and_meaning_of_a_setting_are_told():
    lines = help_of("train", "transformer_lm").splitlines()
    assert "--clip_norm <float or none> [1.0]" in lines
    assert "--precision <fp32 or bf16 or fp16> [fp32]" in lines
    assert "--optimizer.betas <list of float> [[0.9, 0.95]]" in lines
    place = lines.index("--seed <int> [0]")
    assert (
        lines[place + 1]
        == f"    {next(row.meaning for row in describe_settings(find_recipe('resnet')()) if row.path == 'seed')}"
    )


def test_what_is_overridden_shows_in_the_help():
    lines = help_of("train", "resnet", "--sync", "diloco", "--sync.outer_momentum=0.5").splitlines()
    assert f"--sync.period <int> [{DiLoCo().period}]" in lines
    assert "--sync.outer_momentum <float> [0.5]" in lines


def test_the_help_of_other_commands_lists_what_can_be_overridden_there():
    assert squeeze(help_of("compare", "gossip")) == squeeze("\n".join(expected_of(GossipComparison())))
    assert "--num_seeds <int> [" in help_of("reproduce", "language-model-sync")
    assert "--ranks_per_host <" in help_of("verify", "hierarchical")
    assert "--cluster.oversubscription <" in help_of("simulate", "--cluster", "fat_tree")


@pytest.mark.parametrize("command", ["train", "bench", "compare", "reproduce", "memory", "verify"])
def test_without_a_name_there_are_none(command):
    assert help_of(command) == ""


def test_types_are_told_in_words_of_the_command_line():
    assert describe_type(dict[str, str] | None) == "text by name or none"
    assert describe_type(tuple[tuple[float, ...], ...]) == "list of list of float"
    assert describe_type(BytesPerSecond) == "BytesPerSecond"
