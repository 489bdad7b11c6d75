"""The program that ``cloudtrain launch`` starts: `cloudtrain train` or, after ``--``, any program."""

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

PROGRAM = "cloudtrain.program"


class ProgramCommand(TyperCommand):
    """A command whose arguments after ``--`` are a program, stored in ``context.meta[PROGRAM]``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split off the program, and parse the rest."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[PROGRAM] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def check_program(program: Sequence[str], others: Sequence[str]) -> None:
    """Raise ``ValueError`` if no program follows ``--``, or if configuration arguments precede it."""
    if not program:
        raise ValueError("--: expected a program behind it, such as: -- python my.py")
    if others:
        raise ValueError(f"--: expected nothing of a configuration beside a program, got {' '.join(others)}")
