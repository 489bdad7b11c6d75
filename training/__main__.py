"""The command ``cloudtrain``, also ``python -m training``; it needs the packages of the extra ``train``."""

import sys
from importlib.util import find_spec

USAGE_ERROR = 2
# Of the extra train.
NEEDED = (
    *("tensorflow", "jinja2", "keras", "matplotlib", "omegaconf", "psutil", "pydantic", "rich", "sacrebleu"),
    *("sentencepiece", "sklearn", "typer", "yaml"),
)


def main() -> None:
    """Run the command line, or print in one line what to install first."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.stderr.write(f"cloudtrain: {', '.join(missing)} not installed: pip install 'cloudtrain[train]'\n")
        sys.exit(USAGE_ERROR)
    from training.commands.main import main as run

    run()


if __name__ == "__main__":
    main()
