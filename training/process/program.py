"""What ``cloudtrain launch`` starts: a configuration's training or, behind ``--``, any program."""

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

PROGRAM = "cloudtrain.program"


class ProgramCommand(TyperCommand):
    """A command of whose line all behind ``--`` is a program; ``context.meta[PROGRAM]`` holds its words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the program off, and parse the rest."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[PROGRAM] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def check_program(program: Sequence[str], others: Sequence[str]) -> None:
    """Raise ``ValueError`` where no program is behind ``--``, or something of a configuration before it."""
    if not program:
        raise ValueError("--: expected a program behind it, such as: -- python my.py")
    if others:
        raise ValueError(f"--: expected nothing of a configuration beside a program, got {' '.join(others)}")
