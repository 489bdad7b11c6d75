"""Draw what a command printed as an SVG of a terminal: COMMAND | python terminal_svg.py TITLE FILE."""

import sys
from io import StringIO

from rich.console import Console
from rich.text import Text

if __name__ == "__main__":
    title, path = sys.argv[1:]
    lines = sys.stdin.read().splitlines()
    console = Console(record=True, width=max(map(len, lines)), file=StringIO(), highlight=False)
    console.print(Text(f"$ {title}", style="bold"))
    for line in lines:
        console.print(Text(line, style="green" if line.startswith("test accuracy") else ""))
    console.save_svg(path, title="cloudtrain")
