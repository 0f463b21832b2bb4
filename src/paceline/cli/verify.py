"""`paceline verify`: the proof of a collective program."""

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.programs import Algorithm, Collective


def verify(
    context: typer.Context,
    algorithm: Annotated[str, typer.Argument(help="Name of an algorithm, file.py:Class, or `all`.")],
    ranks: Annotated[str, typer.Option(help="Number of ranks; `2:17` for all from 2 to 17.")] = "2:17",
    collective: Annotated[str | None, typer.Option(help="Collective, such as all-reduce; all by default.")] = None,
    root: Annotated[int, typer.Option(help="Rank that a broadcast starts from.")] = 0,
) -> None:
    """Prove collective programs: correct, free of deadlocks and races, bitwise equal on all ranks, no useless sends.

    Settings of the algorithm can be overridden: `paceline verify hierarchical --ranks 12 --ranks_per_host 4`.
    """
    from paceline.cli.overrides import apply_overrides, parse_pairs
    from paceline.programs import list_algorithms
    from paceline.programs.verify import named_proof
    from paceline.programs.verify import verify as prove

    names = list(list_algorithms()) if algorithm == "all" else [algorithm]
    pairs = parse_pairs(context.args)
    numbers = parse_ranks(ranks)
    chosen = [apply_overrides(_find(name, pairs), pairs) for name in names]
    typer.echo(_HEADER)
    for settings in chosen:
        for wanted in _collectives(settings, collective, is_alone=len(chosen) == 1):
            for num_ranks in numbers:
                with named_proof(settings, wanted, num_ranks):
                    summary = prove(settings.build(wanted, num_ranks, root=root))
                typer.echo(
                    f"{settings.name:18} {wanted:15} {num_ranks:5}  {summary.num_rounds:6}  {summary.num_transfers:9}  "
                    f"{summary.sent.mean():8.4f}  {summary.sent.max():8.4f}  {summary.most_in_a_round:8.4f}"
                )
    typer.echo("All proven. Sent: fractions of the buffer, by a rank in all (mean, most) and in one round (most).")


def find_settings(arguments: Sequence[str]) -> "Algorithm | None":
    """Return the settings of the named algorithm."""
    return _find(arguments[0]) if arguments and arguments[0] != "all" else None


def _find(name: str, pairs: Iterable[tuple[str, str]] = ()) -> "Algorithm":
    """Return the settings of the algorithm with that name, or at ``file.py:Class``.

    Args:
        name: Name or path of the algorithm.
        pairs: Overrides, of which the settings without a default are taken.

    Raises:
        SettingsError: There is no such algorithm, or it needs a setting that is not in `pairs`.
    """
    from pydantic import ValidationError

    from paceline.errors import SettingsError
    from paceline.functions import find_function
    from paceline.programs import Algorithm, find_algorithm
    from paceline.registry import explain

    if ":" not in name:
        return find_algorithm(name)()
    found = find_function(name)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise SettingsError(f"{name} must be a class derived from paceline.programs.Algorithm, but is none")
    if inspect.isabstract(found):
        raise SettingsError(f"{name} must define _build(self, collective, num_ranks, root), but does not; add it")
    needed = {field for field, about in found.model_fields.items() if about.is_required()}
    given = {path: value for path, value in pairs if path in needed}
    if missing := sorted(needed - given.keys()):
        raise SettingsError(f"{missing[0]} of {name} must be given; add --{missing[0]} VALUE")
    try:
        return found.model_validate(given)
    except ValidationError as error:
        raise SettingsError(explain(error)) from error


_HEADER = f"{'algorithm':18} {'collective':15} ranks  rounds  transfers  {'mean':>8}  {'most':>8}  {'a round':>8}"


def parse_ranks(text: str) -> list[int]:
    """Return the numbers in ``17`` or ``2:17`` (including the last one).

    Raises:
        SettingsError: The text is no such number or range.
    """
    from paceline.errors import SettingsError

    first, colon, last = text.partition(":")
    try:
        numbers = list(range(int(first), int(last if colon else first) + 1))
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise SettingsError(
            f"--ranks must be a number from 1 on, or two as in 2:17, the smaller first, but got {text!r}; correct it"
        )
    return numbers


def _collectives(settings: "Algorithm", name: str | None, *, is_alone: bool) -> "list[Collective]":
    from paceline.errors import SettingsError, unknown_name
    from paceline.programs import Collective

    if name is None:
        fits = settings.collectives - ({Collective.ALL_TO_ALL} if settings.num_chunks else set())
        if not fits:
            raise SettingsError(
                f"num_chunks must be left out of {settings.name}, which has all_to_all only; leave it out"
            )
        return sorted(fits)
    known = {collective.value: collective for collective in Collective}
    wanted = known.get(name.replace("-", "_"))
    if wanted is None:
        raise unknown_name("--collective", name, known)
    # `all` means all algorithms that have the collective; for a single one, `build` refuses.
    return [wanted] if is_alone or wanted in settings.collectives else []
