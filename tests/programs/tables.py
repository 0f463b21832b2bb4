"""Programs written out by hand, and programs with one transfer changed."""

import numpy as np

from paceline.programs import Program, Round, list_algorithms
from paceline.programs.base import Collective

EVERYTHING = [
    (name, collective) for name, algorithm in list_algorithms().items() for collective in sorted(algorithm.collectives)
]


def build(name, collective, num_ranks, *, root=0, **fields):
    return list_algorithms()[name](**fields).build(Collective(collective), num_ranks, root=root)


def table(collective, num_ranks, num_chunks, rounds, **fields):
    """A program of rows (source, destination, first, count, adds), round by round."""
    made = [_round(rows) for rows in rounds]
    return Program(Collective(collective), "by hand", num_ranks, num_chunks, len(made), made.__getitem__, **fields)


def rows_of(program):
    return [
        list(
            zip(
                *(column.tolist() for column in (r.sources, r.destinations, r.firsts, r.counts, r.adds)),
                strict=True,
            )
        )
        for r in program.rounds()
    ]


def like(program, rounds):
    return table(
        program.collective, program.num_ranks, program.num_chunks, rounds, root=program.root, owners=program.owners
    )


def drops(program):
    """Every program with one chunk of one transfer left out."""
    rounds = rows_of(program)
    for index, rows in enumerate(rounds):
        for place, (source, destination, first, count, adds) in enumerate(rows):
            for chunk in range(first, first + count):
                before = (source, destination, first, chunk - first, adds)
                after = (source, destination, chunk + 1, first + count - chunk - 1, adds)
                kept = [*rows[:place], *(row for row in (before, after) if row[3]), *rows[place + 1 :]]
                yield like(program, [*rounds[:index], kept, *rounds[index + 1 :]])


def mutants(program):
    """Every (kind, program) that differs in one transfer."""
    rounds = rows_of(program)
    for index, rows in enumerate(rounds):
        for place, row in enumerate(rows):
            rest = [*rows[:place], *rows[place + 1 :]]
            for kind, changed in _changes(program, row):
                yield kind, like(program, [*rounds[:index], [*rest, *changed], *rounds[index + 1 :]])
            without = [*rounds[:index], rest, *rounds[index + 1 :]]
            for other in range(len(rounds)):
                if other != index:
                    moved = [*without[:other], [*without[other], row], *without[other + 1 :]]
                    yield "moved", like(program, moved)
                    doubled = [*rounds[:other], [*rounds[other], row], *rounds[other + 1 :]]
                    yield "doubled", like(program, doubled)
            for new in range(len(rounds) + 1):
                yield "moved", like(program, [*without[:new], [row], *without[new:]])


def _changes(program, row):
    """What the row may become: (kind, rows in its place)."""
    source, destination, first, count, adds = row
    yield "dropped", []
    yield "doubled", [row, row]
    for rank in range(program.num_ranks):
        if rank not in (source, destination):
            yield "redirected", [(rank, destination, first, count, adds)]
            yield "redirected", [(source, rank, first, count, adds)]
    yield "redirected", [(destination, source, first, count, adds)]
    yield "add or copy", [(source, destination, first, count, not adds)]
    for other in range(program.num_chunks - count + 1):
        if other != first:
            yield "chunk", [(source, destination, other, count, adds)]
    if first + count < program.num_chunks:
        yield "chunk", [(source, destination, first, count + 1, adds)]
    if count > 1:
        yield "chunk", [(source, destination, first, count - 1, adds)]
        yield "chunk", [(source, destination, first + 1, count - 1, adds)]


def _round(rows):
    columns = np.array([row[:4] for row in rows], np.int64).reshape(-1, 4).T
    return Round(*columns, np.array([row[4] for row in rows], np.bool_))
