import json
import re
from pathlib import Path
from typing import Annotated

import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, JsonValue
from typer.testing import CliRunner

from paceline.cli.describe import describe_settings
from paceline.cli.overrides import _ALIASES, apply_overrides, parse_pairs
from paceline.cli.overrides_command import OverridesCommand
from paceline.data.text import Text
from paceline.errors import SettingsError, UnknownNameError
from paceline.optim import SGD, AdamW, Optimizer
from paceline.recipes import find_recipe
from paceline.registry import Settings, list_variants
from paceline.schedules import Constant, Cosine
from paceline.training import FunctionModel, NextToken, Run


def make_run():
    return Run(
        model=FunctionModel(path="json:dumps", arguments={"width": 8, "sizes": [1, 2]}),
        data=Text(sequence_length=16),
        loss=NextToken(),
        global_batch=4,
        num_steps=100,
    )


def override(*arguments):
    return apply_overrides(make_run(), parse_pairs(arguments))


def refuse(*arguments):
    with pytest.raises(SettingsError) as caught:
        override(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "pairs"),
    [
        (["--num_steps", "5"], [("num_steps", "5")]),
        (["--num-steps=5"], [("num_steps", "5")]),
        (["--data.path=a=b"], [("data.path", "a=b")]),
        (["--data.path="], [("data.path", "")]),
        (["--seed", "-1", "--seed=-2"], [("seed", "-1"), ("seed", "-2")]),
        (["--optimizer.learning-rate", "3e-4"], [("optimizer.learning_rate", "3e-4")]),
        (["--data.path", "a-b c"], [("data.path", "a-b c")]),
        ([], []),
    ],
)
def test_pairs_are_read_in_both_spellings(arguments, pairs):
    assert parse_pairs(arguments) == pairs


@pytest.mark.parametrize("word", ["num_steps", "-n", "--", "5"])
def test_what_is_no_option_is_refused_as_it_was_written(word):
    with pytest.raises(SettingsError, match=f"must look like --field value, but got '{word}'"):
        parse_pairs(["--seed", "1", word])


@pytest.mark.parametrize("arguments", [["--num_steps"], ["--seed", "1", "--num-steps"], ["--num_steps", "--seed", "1"]])
def test_an_option_without_a_value_is_told_by_its_name(arguments):
    assert "--num_steps must have a value, but none follows" in refuse(*arguments)


def test_an_unknown_option_is_told_as_unknown_whether_or_not_it_has_a_value():
    assert refuse("--learning_rte").endswith("did you mean --optimizer.learning_rate?")
    assert refuse("--seed", "1", "--nonsense").startswith("--nonsense must be the path of a setting, but there is none")
    assert "--optimizer.momentum must have a value" in refuse("--optimizer.momentum", "--optimizer", "sgd")


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("num_steps", "70", 70),
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("clip_norm", "none", None),
        ("clip_norm", "None", None),
        ("clip_norm", "2", 2.0),
        ("precision", "bf16", "bf16"),
        ("shares", "[2, 1]", (2.0, 1.0)),
        ("shares", "none", None),
        ("data.path", "some/where", Path("some/where")),
        ("data.path", "2024", Path("2024")),
        ("data.max_bytes", "1000", 1000),
        ("optimizer.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("model.path", "json:loads", "json:loads"),
        ("model.arguments", '{"depth": 3}', {"depth": 3}),
        ("model.arguments.width", "16", {"width": 16, "sizes": [1, 2]}),
        ("model.arguments.name", "wide", {"width": 8, "sizes": [1, 2], "name": "wide"}),
        ("model.arguments.bias", "true", {"width": 8, "sizes": [1, 2], "bias": True}),
        ("model.arguments.sizes", "[3]", {"width": 8, "sizes": [3]}),
        ("loss.temperature", "1", 1.0),
    ],
)
def test_a_value_lands_at_its_path_with_its_type(path, value, expected):
    found = override(f"--{path}", value)
    for part in path.split("."):
        found = found if isinstance(found, dict) else getattr(found, part)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("value", ["none", "None"])
def test_none_takes_back_a_path(value):
    run = apply_overrides(make_run(), [("data.path", "some/where"), ("data.path", value)])
    assert run.data.path is None


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("false", False), ("1", True), ("0", False)])
def test_booleans_are_read_as_words_or_numbers(value, expected):
    run = override("--optimizer", "sgd", "--optimizer.nesterov", value)
    assert run.optimizer.nesterov is expected


def test_a_variant_is_chosen_by_name_and_then_its_fields():
    run = override("--optimizer", "sgd", "--optimizer.momentum", "0.5", "--schedule=constant")
    assert run.optimizer == SGD(momentum=0.5)
    assert run.schedule == Constant(), "fields of the variant that was there are gone"


def test_naming_the_variant_that_is_there_keeps_its_fields():
    run = override("--schedule.warmup_steps", "7", "--schedule", "cosine", "--schedule.final_factor", "0")
    assert run.schedule == Cosine(warmup_steps=7, final_factor=0)


def test_a_variant_whose_fields_have_no_defaults_can_be_chosen_with_them():
    run = apply_overrides(find_recipe("transformer_lm")(), [("model", "function"), ("model.path", "json:dumps")])
    assert run.model == FunctionModel(path="json:dumps")


def test_a_variant_that_lacks_a_field_is_refused_by_the_fields_path():
    with pytest.raises(SettingsError, match=r"model\.path must be given"):
        apply_overrides(find_recipe("transformer_lm")(), [("model", "function")])


def test_the_last_of_two_values_counts():
    assert override("--seed", "1", "--seed", "2").seed == 2


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--learning_rate", "1"], "--optimizer.learning_rate"),
        (["--lr", "1"], "--optimizer.learning_rate"),
        (["--optimizer.lr", "1"], "--optimizer.learning_rate"),
        (["--learning-rte", "1"], "--optimizer.learning_rate"),
        (["--wd", "1"], "--optimizer.weight_decay"),
        (["--momentum", "1", "--optimizer", "sgd"], "--optimizer.momentum"),
        (["--optimizer", "torch.optim:SGD", "--momentum", "0.9"], "--optimizer.arguments.momentum"),
        (["--period", "2", "--sync=diloco"], "--sync.period"),
        (["--bs", "8"], "--global_batch"),
        (["--batch-size", "8"], "--global_batch"),
        (["--epochs", "8"], "--num_epochs"),
        (["--random_seed", "8"], "--seed"),
        (["--num_step", "5"], "--num_steps"),
        (["--width", "5"], "--model.arguments.width"),
        (["--model.width", "5"], "--model.arguments.width"),
        (["--optimizer", "sgd", "--optimizer.momentun", "1"], "--optimizer.momentum"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_unknown_setting_is_told_with_the_path_that_is_meant(arguments, meant):
    assert refuse(*arguments).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize("option", ["--momentum", "--optimizer.momentum"])
def test_a_setting_of_other_variants_is_told_with_those(option):
    assert re.search(
        r"; did you mean --optimizer\.momentum, of --optimizer (\w+, )*sgd\b[^-]*\?$", refuse(option, "0.9")
    )


def test_every_other_name_leads_to_a_setting():
    known = {row.path.rpartition(".")[2] for row in describe_settings(find_recipe("transformer_lm")())}
    assert not [alias for alias, names in _ALIASES.items() if not known & set(names.split())]


def test_an_unknown_setting_that_is_like_none_is_told_with_those_beside_it():
    others = ", ".join(f"--optimizer.{name}" for name in AdamW.model_fields if name != "name")
    beginning = "must be the path of a setting, but there is none of that name; there are:"
    assert refuse("--optimizer.hue", "0.5", "--seed", "1") == f"--optimizer.hue {beginning} {others}"
    assert refuse("--hue", "5").startswith(f"--hue {beginning} --model, --data, ")
    assert refuse("--hue.more", "5").startswith(f"--hue.more {beginning} --model, --data, ")


def test_an_unknown_variant_is_told_with_the_closest_and_all():
    with pytest.raises(UnknownNameError) as caught:
        override("--optimizer", "lamp")
    assert str(caught.value) == (
        "optimizer must be a known name, but got 'lamp'; did you mean 'lamb'? "
        f"known: {', '.join(sorted(list_variants(Optimizer)))}"
    )


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("num_steps", "many", "integer"),
        ("num_steps", "1.5", "integer"),
        ("num_steps", "none", "either num_steps or num_epochs must be given, but got None and None"),
        ("num_steps", "0", "greater than or equal to 1"),
        ("optimizer.learning_rate", "fast", "number"),
        ("optimizer.learning_rate", "-1.0", "greater than 0"),
        ("optimizer.betas", "[0.9]", "betas"),
        ("shares", "half", "--shares must be a list such as [1, 2] or 'measured', but got 'half'"),
        ("bucket_bytes", "0", "bucket_bytes must be greater than or equal to 1, but got 0"),
        ("memory.recompute", "much", "--memory.recompute must be none, full, selective or a budget"),
        ("callbacks", "foo", "--callbacks: a function must be named as module:function"),
        ("callbacks", '["foo"]', "--callbacks: a function must be named as module:function"),
        ("keep_best", "accuracy", "keep_best must be loss, or min: or max:"),
        ("seed", "-1", "seed must be greater than or equal to 0"),
        ("seed", str(10**23), "seed must be less than"),
        ("num_steps", str(10**23), "num_steps must be less than or equal to"),
        ("precision", "fp8", "'fp32', 'bf16' or 'fp16'"),
        ("data.sequence_length", "", "integer"),
        ("model.arguments", "[1]", "dict"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_path_rule_and_value(path, value, rule):
    message = refuse(f"--{path}", value)
    assert path in message
    assert rule in message
    assert value.lower().strip('[]"') in message.lower()
    assert "literal[" not in message, "types of pydantic's are no words of ours"
    assert message.count(f"{path} must") + message.count(f"{path}: ") <= 1, "it is told once"


def test_a_field_that_has_no_fields_is_told():
    assert "num_steps has no fields of its own" in refuse("--num_steps.more", "1")
    assert "has no fields of its own" in refuse("--clip_norm.more", "1")
    assert "has no fields of its own" in refuse("--model.arguments.width.more", "1")


def test_rules_between_fields_are_checked_after_all_overrides():
    nesterov = ["--optimizer", "sgd", "--optimizer.momentum", "0", "--optimizer.nesterov", "true"]
    assert override(*nesterov, "--optimizer.momentum", "0.5").optimizer == SGD(momentum=0.5, nesterov=True)
    assert "momentum must be more than 0 with nesterov" in refuse(*nesterov)


def test_the_original_is_left_as_it_was():
    run = make_run()
    before = json.dumps(run.model_dump(mode="json"))
    changed = apply_overrides(
        run, [("model.arguments.width", "16"), ("model.arguments.sizes", "[]"), ("optimizer", "sgd"), ("seed", "3")]
    )
    assert json.dumps(run.model_dump(mode="json")) == before
    assert changed != run
    changed.model.arguments["sizes"].append(1)
    assert json.dumps(run.model_dump(mode="json")) == before, "nor is anything shared"


@pytest.mark.parametrize("recipe", ["resnet", "transformer_lm"])
def test_no_overrides_change_nothing(recipe):
    run = find_recipe(recipe)()
    assert apply_overrides(run, []) == run


def parse_line(*line):
    """Return what a command with options of its own makes of a command line."""
    seen = {}

    def train(
        context: typer.Context,
        recipe: str,
        workers: int = 2,
        out: str = "",
        flag: Annotated[bool, typer.Option("--flag")] = False,
    ):
        flags = {"flag": True} if flag else {}
        seen.update(recipe=recipe, workers=workers, out=out, overrides=parse_pairs(context.args), **flags)

    app = typer.Typer()
    app.command(cls=OverridesCommand)(train)
    result = CliRunner().invoke(app, line)
    return seen or result


@pytest.mark.parametrize(
    "line",
    [
        ["mine.py", "--workers", "4", "--seed", "1", "--data.path=a=b", "--out", "here"],
        ["--seed", "1", "mine.py", "--data.path=a=b", "--workers=4", "--out=here"],
        ["--seed=1", "--data.path", "a=b", "--out", "here", "--workers", "4", "mine.py"],
    ],
    ids=["after", "around", "before"],
)
def test_overrides_stand_anywhere_beside_a_commands_own_options(line):
    expected = [("seed", "1"), ("data.path", "a=b")]
    assert parse_line(*line) == {"recipe": "mine.py", "workers": 4, "out": "here", "overrides": expected}


def test_values_that_look_like_options_or_arguments_stay_with_their_override():
    assert parse_line("mine.py", "--seed", "-1")["overrides"] == [("seed", "-1")]
    assert parse_line("--model.path", "other.py:f", "mine.py")["recipe"] == "mine.py"


@pytest.mark.parametrize("line", ["mine.py --flag --seed 1", "--flag mine.py --seed=1", "--seed 1 --flag mine.py"])
def test_an_option_without_a_value_leaves_what_follows_alone(line):
    seen = parse_line(*line.split())
    assert (seen["recipe"], seen["overrides"], seen["flag"]) == ("mine.py", [("seed", "1")], True)


def test_help_is_given_beside_overrides():
    result = parse_line("--seed", "1", "--help")
    assert "--workers" in result.output


def test_an_override_without_a_value_takes_no_option_for_one():
    seen = parse_line("mine.py", "--nonsense", "--out", "here", "--workers", "4")
    assert (seen["recipe"], seen["out"], seen["workers"]) == ("mine.py", "here", 4)
    assert [path for path, _ in seen["overrides"]] == ["nonsense"]


def test_an_argument_too_many_is_refused():
    assert "unexpected extra argument" in parse_line("mine.py", "yours.py", "--seed", "1").output


class Everything(Settings):
    integer: int = 0
    number: float = 0.0
    text: str = ""
    maybe: float | None = None
    flag: bool = False
    path: Path = Path()
    numbers: tuple[float, ...] = ()
    table: dict[str, JsonValue] = Field(default_factory=dict)
    bounded: int = Field(default=1, ge=1)


@settings(deadline=None, derandomize=True)
@given(
    integer=st.integers(),
    number=st.floats(allow_nan=False, allow_infinity=False),
    text=st.text(),
    flag=st.booleans(),
    numbers=st.lists(st.floats(-1e6, 1e6)),
    table=st.dictionaries(st.text("abc", min_size=1), st.one_of(st.none(), st.integers(), st.text(), st.booleans())),
)
def test_every_value_can_be_given(integer, number, text, flag, numbers, table):
    """What is written as text or JSON comes back as it was, whatever its type."""
    values = {
        "integer": integer,
        "number": number,
        "text": text,
        "maybe": number,
        "flag": flag,
        "numbers": tuple(numbers),
        "table": table,
    }
    written = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values.items()]
    found = apply_overrides(Everything(), written)
    assert {name: getattr(found, name) for name in values} == values


class Several(Settings):
    optimizers: dict[str, Optimizer] = Field(default_factory=dict)


def test_settings_by_name_are_given_as_json():
    found = apply_overrides(Several(), [("optimizers", '{"mine": {"name": "sgd", "momentum": 0.5}, "other": "adamw"}')])
    assert found.optimizers == {"mine": SGD(momentum=0.5), "other": AdamW()}
    with pytest.raises(SettingsError, match=r"optimizers.*nothing"):
        apply_overrides(Several(), [("optimizers", '{"mine": "nothing"}')])


OWN = ["--optimizer", "torch.optim:SGD"]


@pytest.mark.parametrize(
    ("given", "arguments", "clip_norm", "schedule"),
    [
        ({}, OWN, None, Constant()),
        ({"optimizer": torch.optim.SGD}, ["--optimizer", "adamw"], 1.0, Cosine(warmup_steps=20)),
        (
            {"optimizer": torch.optim.SGD},
            ["--optimizer", "torch.optim:Adam", "--optimizer.arguments.lr", "1"],
            None,
            Constant(),
        ),
        ({"clip_norm": 1.0}, OWN, 1.0, Constant()),
        ({"schedule": Cosine(warmup_steps=20)}, OWN, None, Cosine(warmup_steps=20)),
        ({"optimizer": torch.optim.SGD, "clip_norm": None}, ["--optimizer", "sgd"], None, Cosine(warmup_steps=20)),
        ({}, ["--clip_norm", "1", *OWN], 1.0, Constant()),
        ({}, [*OWN, "--schedule", "cosine", "--schedule.warmup_steps", "3"], None, Cosine(warmup_steps=3)),
        ({}, ["--schedule.warmup_steps", "3", *OWN], None, Constant(warmup_steps=3)),
        ({"optimizer": torch.optim.SGD}, ["--schedule.warmup_steps", "3"], None, Constant(warmup_steps=3)),
        ({}, ["--optimizer", "sgd"], 1.0, Cosine(warmup_steps=20)),
    ],
)
def test_defaults_follow_the_optimizer_that_counts_and_what_was_given_stays(given, arguments, clip_norm, schedule):
    """In the run or on the command line, in any order, and whether or not other overrides come before or after."""
    run = Run.model_validate(make_run().model_dump(exclude_unset=True) | given)
    for changed in (
        apply_overrides(run, parse_pairs(arguments)),
        apply_overrides(apply_overrides(run, [("seed", "1")]), parse_pairs(arguments)),
        apply_overrides(apply_overrides(run, parse_pairs(arguments)), [("seed", "1")]),
    ):
        assert (changed.clip_norm, changed.schedule) == (clip_norm, schedule)
    begun = Run.model_validate(run.model_dump(mode="json"))
    assert (begun.clip_norm, begun.schedule) == (run.clip_norm, run.schedule)
