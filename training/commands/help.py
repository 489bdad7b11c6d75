"""Commands of ``cloudtrain``: the texts of ``--help``, and the program after ``--``."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

PROGRAM = "cloudtrain.program"

# The default metavar of an option, by its Python type.
VALUES = {"int": "NUMBER", "float": "NUMBER", "str": "TEXT"}


class Group(TyperGroup):
    """Commands whose help is readable at any width."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None:
            return None
        # Else the list of commands truncates texts that are longer than a line.
        command.short_help = command.short_help or " ".join((command.help or "").partition("\n\n")[0].split())
        for parameter in command.params:
            _show_plainly(parameter)
        return command


def _show_plainly(parameter: Any) -> None:
    if parameter.param_type_name == "argument":
        parameter.display_type_rich = lambda ctx: None
    elif parameter.metavar is None and not parameter.is_flag:
        kind = parameter.bare_type().removeprefix("list[").removesuffix("]")
        parameter.metavar = VALUES.get(kind)


class ProgramCommand(TyperCommand):
    """A command whose arguments after ``--`` are a program, stored in ``context.meta[PROGRAM]``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[PROGRAM] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)
