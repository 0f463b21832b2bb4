"""Programs that a group may run: Paceline's own, which tests prove, and a user's own once they are proved here."""

import hashlib

from paceline.comm.group import Group
from paceline.errors import PacelineError, ProgramError
from paceline.programs import Algorithm, Collective, Program
from paceline.programs.verify import named_proof, verify

_PROVEN: set[str] = set()
"""Digests of the programs that this process has proved."""


def build_program(algorithm: Algorithm, collective: Collective, group: Group, *, root: int = 0) -> Program:
    """Return the program of `algorithm` for `group`; every rank calls it.

    A program of a user's own is built by every rank and proved by rank 0, and must be the same on all ranks.

    Raises:
        SettingsError: The algorithm has no program of that collective, or none for that number of ranks.
        ProgramError: The program is wrong, or ranks have built different ones. If it fails on any rank, it does on all.
    """
    if type(algorithm).__module__.partition(".")[0] == "paceline" or group.size == 1:
        return algorithm.build(collective, group.size, root=root)
    failure: PacelineError | None = None
    digest = ""
    try:
        with named_proof(algorithm, collective, group.size):
            program = algorithm.build(collective, group.size, root=root).read()
            digest = _digest(program)
            if group.rank == 0 and digest not in _PROVEN:
                verify(program)
                _PROVEN.add(digest)
    except PacelineError as error:
        failure = error
    everybody = group.gather_documents([digest, str(failure or "")], name=f"proof of {algorithm.name}")
    if failure is not None:
        raise failure
    for _, reason in everybody:
        if reason:
            raise ProgramError(reason)
    odd = next((rank for rank, (other, _) in enumerate(everybody) if other != everybody[0][0]), None)
    if odd is not None:
        raise ProgramError(
            f"{algorithm.name} {collective} for {group.size} ranks: ranks must build the same program, but that of "
            f"rank {group.names[odd]} has other rounds than that of rank {group.names[0]}; let _build depend on "
            "nothing but its arguments and settings"
        )
    return program


def _digest(program: Program) -> str:
    """Return a hash of all that decides what a program does."""
    found = hashlib.blake2b(digest_size=16)
    about = (str(program.collective), program.num_ranks, program.num_chunks, program.num_rounds, program.root)
    found.update(repr((*about, None if program.owners is None else program.owners.tolist())).encode())
    for round_ in program.rounds():
        for column in vars(round_).values():
            found.update(f"{len(column)}".encode() + column.astype("<i8").tobytes())
    return found.hexdigest()
