"""Make the API reference from the docstrings: python scripts/api_reference.py [FOLDER], else in build/api."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pdoc

from commlib.tf_logging import without_noise

FOLDER = Path(__file__).resolve().parents[1] / "build" / "api"
MODULES = (  # and what their __all__ names
    *("commlib", "commlib.cost", "commlib.gpu", "commlib.keras", "commlib.reducers", "commlib.selection"),
    *("commlib.tensorflow", "commlib.tuning.probe", "commlib.tuning.tuner", "commlib.wire"),
    *("datacache", "datacache.sources", "datacache.tensorflow"),
    *("pto", "pto.keras", "pto.sharded"),
    *("training", "training.config.config", "training.config.records"),
    *(f"commlib.{name}" for name in ("torch", "jax") if find_spec(name)),
)


def build(folder: Path) -> None:
    """Write a page for each module that users import from."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    with without_noise():
        import training

        vars(training)["Trainer"] = training.Trainer  # imported at the first access, which pdoc does not make
        pdoc.render.configure(docformat="restructuredtext", show_source=False)
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
