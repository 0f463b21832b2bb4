import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import textwrap

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from paceline.data import Spec
from paceline.errors import SettingsError
from paceline.functions import find_function, name_function
from paceline.registry import explain
from paceline.training import FunctionModel, Model

SPEC = Spec(num_classes=3, input_shape=(4,))


def build_small(width=2, *, bias=True):
    return nn.Linear(width, 3, bias=bias)


def build_nothing():
    return {"not": "a module"}


class Factory:
    def build(self):
        return nn.Identity()


in_one_line = lambda: nn.Identity()  # noqa: E731


@pytest.fixture
def user_file(tmp_path):
    """Write a user's own file, which imports its neighbour as a script may."""
    (tmp_path / "neighbour_of_mine.py").write_text("WIDTH = 5\n")
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent(
            """
            from torch import nn

            from neighbour_of_mine import WIDTH


            def build(num_outputs=1, bias=False):
                return nn.Linear(WIDTH, num_outputs, bias)


            class _Hidden:
                pass
            """
        )
    )
    yield file
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]
    sys.modules.pop("neighbour_of_mine", None)


def test_a_function_of_a_file_is_found_and_called_with_its_arguments(user_file):
    model = FunctionModel(path=f"{user_file}:build", arguments={"num_outputs": 7, "bias": True})
    module = model.build(SPEC)
    assert isinstance(module, nn.Linear)
    assert (module.in_features, module.out_features, module.bias is None) == (5, 7, False)


def test_a_file_is_loaded_once_under_whatever_path_it_is_named(user_file, monkeypatch):
    monkeypatch.chdir(user_file.parent)
    assert find_function(f"{user_file}:build") is find_function("mine.py:build")
    assert find_function("./mine.py:build") is find_function("mine.py:build")


def test_what_a_users_file_defines_can_be_sent_to_another_process(tmp_path):
    """Its name is the same in every process, and one that is imported from the folder."""
    file = tmp_path / "mine_and_pickled.py"
    file.write_text("import sys\n\n\ndef leave():\n    sys.exit(7)\n")
    leave = find_function(f"{file}:leave")
    process = multiprocessing.get_context("spawn").Process(target=leave)
    process.start()
    process.join()
    assert process.exitcode == 7
    sys.path.remove(str(tmp_path))


def test_a_neighbour_that_imports_the_users_file_gets_the_same_module(tmp_path):
    (tmp_path / "mine_with_neighbour.py").write_text("import neighbour_that_imports\n\n\ndef build():\n    pass\n")
    (tmp_path / "neighbour_that_imports.py").write_text("import mine_with_neighbour as mine\n")
    build = find_function(f"{tmp_path}/mine_with_neighbour.py:build")
    assert sys.modules["neighbour_that_imports"].mine.build is build
    sys.path.remove(str(tmp_path))


def test_a_file_that_is_called_as_another_module_is_called_so_in_every_process(tmp_path):
    file = tmp_path / "json.py"
    file.write_text("def build():\n    pass\n")
    path = f"{file}:build"
    name = find_function(path).__module__
    program = f"from paceline.functions import find_function; print(find_function({path!r}).__module__)"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    elsewhere = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert elsewhere.stdout == f"{name}\n", elsewhere.stderr
    assert name != "json"
    sys.path.remove(str(tmp_path))


def test_two_files_of_one_name_are_two_modules(user_file, tmp_path):
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text("def build():\n    return 1\n")
    assert find_function(f"{other}:build")() == 1
    assert find_function(f"{user_file}:build") is not find_function(f"{other}:build")
    sys.path.remove(str(other.parent))


def test_a_function_of_a_module_is_found():
    assert find_function("torch.nn.functional:relu") is torch.nn.functional.relu
    assert Model.model_validate({"name": "function", "path": "json:dumps"}).path == "json:dumps"


def test_a_function_given_in_python_becomes_its_path_and_comes_back_from_json():
    model = Model.model_validate(build_small)
    assert model == FunctionModel(path=f"{__name__}:build_small")
    again = Model.model_validate(json.loads(model.model_dump_json()))
    assert again == model
    assert find_function(again.path) is build_small
    assert isinstance(again.build(SPEC), nn.Linear)


def test_a_function_of_a_users_file_is_named_by_the_file(user_file):
    """The name that the module has in this process means nothing in another."""
    build = find_function(f"{user_file}:build")
    assert name_function(build) == f"{user_file.resolve()}:build"
    assert Model.model_validate(build).build(SPEC).in_features == 5


def test_a_function_of_the_script_that_runs_is_named_by_its_file(tmp_path):
    script = tmp_path / "train_it.py"
    script.write_text(
        "from paceline.functions import name_function\n\ndef build():\n    pass\n\nPATH = name_function(build)\n"
    )
    assert runpy.run_path(str(script), run_name="__main__")["PATH"] == f"{script.resolve()}:build"


def refuse(value):
    with pytest.raises((SettingsError, ValidationError)) as caught:
        Model.model_validate(value)
    error = caught.value
    return explain(error) if isinstance(error, ValidationError) else str(error)


def test_a_function_that_another_process_cannot_find_is_refused():
    def nested():
        return nn.Identity()

    for function in (nested, Factory.build, lambda: nn.Identity()):
        assert "at the top of a module, but got" in refuse(function)


def test_a_lambda_at_the_top_of_a_module_is_refused_too():
    assert "at the top of a module" in refuse(in_one_line)


def test_a_function_that_its_name_no_longer_means_is_refused(monkeypatch):
    """Or the run would silently train what has taken the name."""
    monkeypatch.setitem(globals(), "build_small", build_nothing)
    assert "build_small" in refuse(original_build_small)


original_build_small = build_small


@pytest.mark.parametrize("path", ["", "build", ":build", "json:", "mine.py", "a/b.py"])
def test_what_names_no_function_is_told_the_form(path):
    assert f"module:function or file.py:function, but got {path!r}" in refuse({"name": "function", "path": path})


def test_a_missing_file_is_told_by_its_path(tmp_path):
    missing = tmp_path / "none.py"
    assert f"the file of a function must exist, but got {missing}" in refuse(
        {"name": "function", "path": f"{missing}:build"}
    )


@pytest.mark.parametrize("place", ["no_such_package.models", "json.no_such_module", "no_such_module"])
def test_a_missing_module_is_told_by_its_name(place):
    assert f"module {place!r} must be importable" in refuse({"name": "function", "path": f"{place}:build"})


@pytest.mark.parametrize("place", [".models", "a..b"])
def test_a_module_path_that_is_none_is_refused(place):
    assert place in refuse({"name": "function", "path": f"{place}:build"})


def test_a_missing_function_is_told_with_those_there_are(user_file):
    message = refuse({"name": "function", "path": f"{user_file}:buidl"})
    assert f"{user_file} must define the function 'buidl', but it has: build" in message


def test_an_error_inside_the_users_file_is_not_hidden(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import a_package_that_is_not_there\n")
    for _ in range(2):  # a file that failed is not left half loaded
        with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
            find_function(f"{broken}:build")
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_an_error_inside_the_users_module_is_not_taken_for_a_wrong_name(tmp_path, monkeypatch, error):
    (tmp_path / f"broken_by_{error.__name__}.py").write_text(f"raise {error.__name__}('a mistake of mine')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=r"^a mistake of mine$"):
        find_function(f"broken_by_{error.__name__}:build")


def test_what_is_no_module_is_refused_when_it_is_built():
    model = FunctionModel(path=name_function(build_nothing))
    with pytest.raises(SettingsError, match=r"build_nothing must return a torch\.nn\.Module, but got dict"):
        model.build(SPEC)


@pytest.mark.parametrize(
    "arguments", [{"object": object()}, {"function": lambda: 1}, {1: 2}], ids=["object", "lambda", "key"]
)
def test_arguments_that_json_cannot_hold_are_refused(arguments):
    with pytest.raises(ValidationError, match="arguments"):
        FunctionModel(path="json:dumps", arguments=arguments)
