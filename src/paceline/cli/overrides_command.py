"""A command that takes any of its settings as an option, and lists them in its help."""

from collections.abc import Callable, Sequence
from typing import Any

from typer.core import TyperCommand

from paceline.registry import Settings


class OverridesCommand(TyperCommand):
    """A command that takes any ``--field value`` beside its own options, and has them in ``context.args``."""

    find_settings: Callable[[Sequence[str]], Settings | None] | None = None
    """Function that returns the settings to override, from the arguments; None if these do not name any."""

    @classmethod
    def of(cls, find_settings: Callable[[Sequence[str]], Settings | None]) -> "type[OverridesCommand]":
        """Return a class of commands whose help lists the settings that `find_settings` finds."""
        return type(cls.__name__, (cls,), {"find_settings": staticmethod(find_settings)})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Extract the overrides with their values, before the rest is parsed."""
        own, flags = {"--help"}, {"--help"}
        for parameter in self.params:
            names = {*parameter.opts, *parameter.secondary_opts}
            own |= names
            flags |= names if getattr(parameter, "is_flag", False) else set()
        mine: list[str] = []
        overrides: list[str] = []
        arguments: list[str] = []
        waiting = list(args)
        while waiting:
            word = waiting.pop(0)
            is_override = word.startswith("--") and word.partition("=")[0] not in own
            (overrides if is_override else mine).append(word)
            if not word.startswith("-"):
                arguments.append(word)
            has_value = "=" not in word and word.startswith("--") and word not in flags and bool(waiting)
            if has_value and not (
                is_override and waiting[0].startswith("--")
            ):  # an override without value is told later
                (overrides if is_override else mine).append(waiting.pop(0))
        ctx.meta.update(arguments=arguments, overrides=overrides)
        super().parse_args(ctx, mine)
        ctx.args = overrides
        return overrides

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, then the settings, with the overrides of the command line."""
        super().format_help(ctx, formatter)
        settings = self.find_settings(ctx.meta["arguments"]) if self.find_settings is not None else None
        if settings is not None:
            from paceline.cli.describe import print_settings
            from paceline.cli.overrides import apply_overrides, parse_pairs

            print_settings(apply_overrides(settings, parse_pairs(ctx.meta["overrides"])))
