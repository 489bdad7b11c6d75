"""What ``--help`` shows: arguments without Python's types, and whole sentences of commands."""

from typing import Any

from typer.core import TyperGroup

# What stands for the value of an option that names none, by the type of Python's that it has.
VALUES = {"int": "NUMBER", "float": "NUMBER", "str": "TEXT"}


class Group(TyperGroup):
    """Commands whose help can be read at any width."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, made ready to be shown."""
        command = super().get_command(ctx, cmd_name)
        if command is None:
            return None
        # Else the list of commands cuts what is longer than a line.
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
