"""Layer 10: recipes, functions that return a complete run."""

from collections.abc import Callable

from paceline.errors import unknown_name
from paceline.functions import find_function
from paceline.training.run import Run

RECIPES = {
    "actor_critic": "paceline.recipes.actor_critic:run",
    "bert": "paceline.recipes.bert:run",
    "resnet": "paceline.recipes.resnet:run",
    "rnn": "paceline.recipes.rnn:run",
    "transformer_lm": "paceline.recipes.transformer_lm:run",
}

__all__ = ["RECIPES", "find_recipe"]


def find_recipe(name: str) -> Callable[[], Run]:
    """Return a recipe by its name, or the user's own at ``file.py:function`` or ``package.module:function``.

    Raises:
        UnknownNameError: No recipe has that name.
        SettingsError: There is no such file, module or function.
    """
    if ":" in name:
        return find_function(name)
    if name.endswith(".py"):
        return find_function(f"{name}:run")
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return find_function(RECIPES[name])
