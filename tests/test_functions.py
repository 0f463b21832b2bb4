import functools
import json
import operator
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError

from paceline.cli.describe import describe_settings
from paceline.cli.overrides import apply_overrides, parse_pairs
from paceline.errors import SettingsError
from paceline.functions import Function, find_hint
from paceline.registry import Settings, explain
from paceline.training import FunctionModel, Model

HERE = __name__


def take(
    first: int,
    width: int = 8,
    *,
    ratio: float = 0.5,
    name: str = "",
    flag: bool = False,
    sizes: tuple[int, ...] = (),
    kind: Literal["a", "b"] = "a",
    rate: "float | torch.Tensor" = 1.0,
    table: dict[str, int] | None = None,
    free=None,
):
    return dict(locals())


def take_model(model, num_steps, *, extra=1):
    return model, num_steps, extra


def take_anything(*args, **kwargs):
    return args, kwargs


class Held(Settings):
    function: Function


def load(value: Any) -> Function:
    return Function.model_validate(value)


def refuse(value: Any, kind: type[Function] = Function) -> str:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(value)
    return explain(caught.value)


@pytest.mark.parametrize(
    ("argument", "written", "expected"),
    [
        ("width", "16", 16),
        ("ratio", "1", 1.0),
        ("name", "12", "12"),
        ("flag", "true", True),
        ("sizes", "[3, 4]", (3, 4)),
        ("kind", "b", "b"),
        ("rate", "1e-3", 1e-3),
        ("table", '{"a": 1}', {"a": 1}),
        ("table", "none", None),
        ("free", "[1]", [1]),
        ("free", "word", "word"),
    ],
)
def test_an_argument_has_the_type_of_its_annotation(argument, written, expected):
    """From the command line, and after it went through a run's file."""
    held = apply_overrides(Held(function=take), parse_pairs([f"--function.arguments.{argument}", written]))
    again = Held.model_validate(json.loads(held.model_dump_json()))
    assert again == held
    found = again.function.call(1)[argument]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"widht": 3}, f"an argument of {HERE}:take must be a known name, but got 'widht'; did you mean 'width'?"),
        ({"width": "wide"}, f"width of {HERE}:take must be a valid integer"),
        ({"width": 1.5}, "but got 1.5"),
        ({"kind": "c"}, "'a' or 'b'"),
        ({"rate": "fast"}, "must be a valid number"),
    ],
)
def test_arguments_that_do_not_fit_the_signature_are_refused(arguments, problem):
    assert problem in refuse({"path": f"{HERE}:take", "arguments": arguments})


def test_what_is_given_by_position_is_no_argument():
    class WithModel(Function):
        given = ("the model",)
        offered = ("num_steps",)

    function = WithModel.model_validate(take_model)
    assert "known: extra, num_steps" in refuse({"path": take_model, "arguments": {"model": 1}}, WithModel)
    assert list(function.list_arguments()) == ["extra"], "what it is offered need not be given"
    function.check_complete("schedule")
    assert function.call("m", num_steps=5, total_steps=6) == ("m", 5, 1)
    given = WithModel.model_validate(functools.partial(take_model, num_steps=7))
    assert given.call("m", num_steps=5) == ("m", 7, 1), "an argument is stronger"
    assert given.first_parameter == "model"


def test_a_function_that_cannot_take_what_it_is_given_is_refused():
    class Two(Function):
        given = ("the model", "the batch")

    message = refuse(f"{HERE}:refuse_nothing", Two)
    assert "must take the model and the batch as its first 2 parameters, but has 1: (only)" in message
    assert Two.model_validate(take_anything).call(1, 2) == ((1, 2), {})


def refuse_nothing(only):
    return only


def test_a_missing_argument_is_named_before_anything_is_called():
    function = load(take)
    with pytest.raises(SettingsError, match=r"'first' is missing; give --model\.arguments\.first"):
        function.check_complete("model")
    load({"path": take, "arguments": {"first": 1}}).check_complete("model")


def test_any_name_fits_what_takes_any():
    assert load({"path": take_anything, "arguments": {"what": 1}}).call() == ((), {"what": 1})
    assert load({"path": "operator:itemgetter"}).call(0)([7]) == 7, "nothing is known of its parameters"


def test_a_partial_with_keywords_is_its_function_with_arguments():
    partial = functools.partial(functools.partial(take, width=3, ratio=1.0), width=4)
    assert load(partial) == load({"path": f"{HERE}:take", "arguments": {"width": 4, "ratio": 1.0}})


@pytest.mark.parametrize(
    "given",
    [take_model, [take, {"of": take}], functools.partial(take_anything, of=[take]), torch.nn.GELU],
    ids=["function", "functions inside", "partial", "class"],
)
@pytest.mark.parametrize("argument", ["free", "name"], ids=["unannotated", "annotated as text"])
def test_an_argument_may_be_a_function(given, argument):
    made = load(functools.partial(take, **{argument: given}))
    saved = load(json.loads(made.model_dump_json()))
    assert saved == made
    got = saved.call(0)[argument]
    if isinstance(given, functools.partial):
        assert got() == given()
    else:
        assert got == given


def test_a_function_among_the_arguments_must_be_found_too():
    assert "must define the function 'nothing'" in refuse(
        {"path": f"{HERE}:take", "arguments": {"free": [{"$function": f"{HERE}:nothing"}]}}
    )


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (functools.partial(take, 3), "a partial in a run must have keyword arguments only, but got (3,) for take"),
        (functools.partial(take, free=object()), "arguments.free must be a value that JSON can represent, or a func"),
        (functools.partial(take, free=lambda: None), "at the top of a module"),
        (lambda: None, "at the top of a module"),
        (
            torch.nn.CrossEntropyLoss(),
            "but got an object of CrossEntropyLoss; define one with def that calls or returns it",
        ),
        (operator.itemgetter(1), "but got an object of itemgetter"),
        ([].append, "that a module defines"),
    ],
    ids=["position", "object", "lambda as argument", "lambda", "object that can be called", "of C", "method of C"],
)
def test_what_a_saved_run_could_not_find_again_is_refused(value, problem):
    assert problem in refuse(value)


def test_a_class_is_a_function_that_makes_its_objects():
    function = load(functools.partial(torch.optim.SGD, lr=0.1))
    assert function.path == "torch.optim.sgd:SGD"
    assert find_hint(function.path, "momentum") is float
    assert function.call([torch.zeros(1, requires_grad=True)]).defaults["lr"] == 0.1


def test_a_file_is_saved_by_its_absolute_path(tmp_path, monkeypatch):
    (tmp_path / "functions_of_mine.py").write_text("def build():\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # so that what loading the file puts there goes again
    assert load("functions_of_mine.py:build").path == f"{tmp_path.resolve()}/functions_of_mine.py:build"


def test_a_family_that_takes_functions_takes_them_by_path_too():
    assert Model.model_validate(f"{HERE}:take_anything") == FunctionModel(path=take_anything)
    held = apply_overrides(Held(function=take), [("function", f"{HERE}:take_anything")])
    assert held.function == load(take_anything)


def test_arguments_are_listed_with_their_values_and_types():
    rows = {path: row for path, *row in describe_settings(Held(function=take))}
    assert rows["function.arguments.width"] == ["int", "8", f"Argument of {HERE}:take."]
    assert rows["function.arguments.first"] == ["int", "none", f"Argument of {HERE}:take, which must be given."]
    assert rows["function.arguments.free"][0] == "JSON"
    assert "function.arguments" not in rows


def test_a_setting_that_is_an_argument_is_found():
    with pytest.raises(SettingsError, match=r"did you mean --function\.arguments\.ratio\?"):
        apply_overrides(Held(function=take), [("ratio", "1")])
