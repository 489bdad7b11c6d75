"""The wheel, installed away from the clone: what it needs, what it brings, and that it trains.

The environments of these tests see packages of this one through a path file, which does not show the clone.
"""

import shutil
import sys
import sysconfig
import venv
from functools import partial
from importlib.metadata import distribution, requires
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import launching
from tests.launching import ENVIRONMENT, ROOT, errors, tail
from tests.training.small import metrics_of
from training.config.reading import located

PACKAGES = ("commlib", "datacache", "pto", "training")
SITE = Path(sysconfig.get_path("purelib"))
VARIABLES = {**ENVIRONMENT, "LD_LIBRARY_PATH": f"{sys.prefix}/lib", "OPAL_PREFIX": sys.prefix}  # Open MPI's
PLAIN = """
import pathlib
import numpy as np
import commlib, datacache, pto

def step(comm):
    reducer = commlib.make_reducer("hitopk", commlib.Topology(comm, ranks_per_node=2), size=100, density=0.1)
    return int(np.count_nonzero(reducer.reduce(np.arange(100, dtype=np.float32))))

print(commlib.transport.simulated.run(step, world_size=4))
samples = datacache.Arrays(np.zeros((8, 4, 4, 1), np.uint8), np.arange(8))
order = datacache.Order(samples=8, shards=1, global_batch=4, seed=1)
cache = datacache.DataCache(samples, dirs=datacache.CacheDirs(memory=pathlib.Path("levels").resolve()))
for _ in range(2):
    batches = list(cache.batches(order, datacache.CentreCrop(4), rank=0, world_size=1, epoch=0))
print(sorted(int(label) for batch in batches for label in batch.labels), cache.counts.memory)
cache.close()
print(float(pto.sum_of_squares(np.ones(3, np.float32))))
print(commlib.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the wheel of the clone as it is, which is not written to."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "configs", "clusters"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cloudtrain.py", "pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(source))
    (made,) = built.iterdir()
    return made


def pip(*words: str) -> None:
    result = run(sys.executable, "-m", "pip", "--disable-pip-version-check", *words, cwd=ROOT)
    assert result.returncode == 0, tail(result)


def environment(folder: Path, wheel: Path, packages: Path) -> Path:
    """Return the programs of a new environment that has the wheel and sees the packages of a folder."""
    venv.create(folder)
    programs = folder / "bin"
    pip("--python", str(programs / "python"), "install", "--no-deps", "--no-index", str(wheel))
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "packages.pth").write_text(f"{packages}\n")
    return programs


def base_packages() -> set[str]:
    """Return the names of what a plain ``pip install`` brings along, and what that brings."""
    found, waiting = set(), {("cloudtrain", "")}
    while waiting:
        found |= waiting
        needed = {
            (canonicalize_name(each.name), wanted)
            for name, extra in waiting
            for each in map(Requirement, requires(name) or ())
            if each.marker is None or each.marker.evaluate({"extra": extra})
            for wanted in ("", *each.extras)
        }
        waiting = needed - found
    return {name for name, _ in found} - {"cloudtrain"}


@pytest.fixture(scope="module")
def plain(wheel, tmp_path_factory):
    """Return the programs of an environment that has what the wheel asks for without an extra."""
    shown = tmp_path_factory.mktemp("packages")
    for name in base_packages():
        for top in {file.parts[0] for file in distribution(name).files or ()} - {".."}:
            if not (shown / top).exists():
                (shown / top).symlink_to(SITE / top)
    return environment(tmp_path_factory.mktemp("plain"), wheel, shown)


@pytest.fixture(scope="module")
def full(wheel, tmp_path_factory):
    """Return the programs of an environment that has all that this one has, but the clone."""
    return environment(tmp_path_factory.mktemp("full"), wheel, SITE)


run = partial(launching.run, env=VARIABLES)


@pytest.mark.slow
@pytest.mark.launch
def test_a_plain_installation_reduces_reads_samples_and_computes_norms(plain, tmp_path):
    result = run(plain / "python", "-c", PLAIN, cwd=tmp_path, env=VARIABLES | {"NUMBA_DISABLE_JIT": "1"})
    assert result.returncode == 0, tail(result)
    *results, place = result.stdout.splitlines()
    assert results == [str([10] * 4), f"{list(range(8))} 8", "3.0"]
    assert place.startswith(str(plain.parent))


@pytest.mark.slow
@pytest.mark.launch
def test_a_plain_installation_says_in_one_line_what_the_command_needs(plain, tmp_path):
    result = run(plain / "cloudtrain", "train", "digits", cwd=tmp_path)
    missing = "tensorflow, jinja2, keras, matplotlib, omegaconf, psutil, pydantic, rich, sacrebleu"
    missing += ", sentencepiece, sklearn, typer, yaml"
    assert result.stderr == f"cloudtrain: {missing} not installed: pip install 'cloudtrain[train]'\n"
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("folder", ["configs", "clusters"])
def test_the_wheel_holds_all_that_is_found_by_name(wheel, folder):
    there = {f"training/{folder}/{path.name}" for path in (ROOT / folder).glob("*.yaml")}
    assert len(there) > 2
    assert there <= set(ZipFile(wheel).namelist())


@pytest.mark.slow
@pytest.mark.launch
def test_the_wheel_trains_digits_by_name_in_one_process_which_needs_no_profile(full, tmp_path):
    brief = ("phases.0.epochs=1", "phases.1.epochs=1", "reducer=auto")
    result = run(full / "cloudtrain", "train", "digits", *brief, cwd=tmp_path)
    assert result.returncode == 0, tail(result)
    assert "test accuracy" in result.stdout
    assert "one rank, so nothing is exchanged" in result.stdout
    assert "phase 1: auto picks dense: one rank has no other to exchange with\n" in result.stdout
    assert errors(result) == ""
    (summary,) = [line for line in metrics_of(tmp_path / "runs") if line["kind"] == "summary"]
    assert summary["top1"] > 0.9
    assert [phase["sent_inter_bytes"] for phase in summary["phases"]] == [0, 0]
    (weights,) = (tmp_path / "runs").glob("digits-*/model.weights.h5")
    reported = run(full / "cloudtrain", "report", weights.parent, cwd=tmp_path)
    assert reported.returncode == 0, tail(reported)
    assert (weights.parent / "report.html").exists()
    place = run(full / "python", "-c", "import training; print(training.__file__)", cwd=tmp_path).stdout
    assert place.startswith(str(full.parent))


def test_a_file_that_is_there_goes_before_a_configuration_that_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r'one that ships: unknown .*, did you mean "digits"\?$'):
        located("digit")
    assert located("digits") == ROOT / "configs" / "digits.yaml"
    Path("digits").mkdir()  # a folder is no configuration
    assert located("digits") == ROOT / "configs" / "digits.yaml"
    Path("mnist5k").touch()
    assert located("mnist5k") == Path("mnist5k")
