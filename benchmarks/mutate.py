"""Plant single faults, one at a time, and run the tests of their area: those that no test finds survive.

    python -m benchmarks.mutate                                   # all areas: some twenty minutes of a core
    python -m benchmarks.mutate --area wire --jobs 1

The faults are in ``benchmarks/faults.yaml``: of each, a text that its file has once, and its replacement.
Tests run in copies of the working tree, which itself is never changed. The exit status is 1 where a fault
survives.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "benchmarks" / "faults.yaml"
NOT_COPIED = (".git", ".venv*", ".hypothesis", ".*_cache", "*.egg-info", "runs")
PYTEST = "-x -q -n 0 --tb=no -rfE -p no:cacheprovider --hypothesis-seed=0 --timeout=100"
MARKERS = "not launch and not cluster and not gpu"
SPARE_SECONDS = 60  # that tests with a fault may take beyond twice those without: then it hangs
WITHOUT_RESULT = {5: "no test is chosen", -signal.SIGKILL: "killed", -signal.SIGTERM: "killed"}
CAUGHT, SURVIVED, UNUSABLE = "caught", "SURVIVED", "does not apply"


@dataclass(frozen=True)
class Area:
    """Test files that are about one thing; ``only``: which of their tests, as pytest's ``-k`` takes it."""

    tests: Sequence[str]
    only: str = ""


@dataclass(frozen=True)
class Fault:
    """A mistake: ``old``, in ``file`` once, becomes ``new``; ``only``: the tests of the area to run."""

    id: str
    area: str
    file: str
    old: str
    new: str
    only: str = ""

    def applies(self, tree: Path) -> bool:
        """Return whether the file has the old text, and only once."""
        file = tree / self.file
        return file.is_file() and file.read_text().count(self.old) == 1

    def plant(self, tree: Path) -> None:
        file = tree / self.file
        text = file.read_text()
        file.write_text(text.replace(self.old, self.new))
        if "@compiled" in text:
            forget_kernels(tree, self.file)


def load(path: Path) -> tuple[dict[str, Area], list[Fault]]:
    content = yaml.safe_load(path.read_text())
    areas = {name: Area(**area) for name, area in content["areas"].items()}
    faults = [Fault(area=area, **each) for area, given in content["faults"].items() for each in given]
    return areas, faults


def forget_kernels(tree: Path, file: str) -> None:
    """Remove compiled kernels of the modules that import a file, directly or not: they may contain its code.

    Numba compiles a kernel again where the file of the kernel itself has changed, and only then.
    """
    texts = {path: path.read_text() for path in tree.glob(f"{Path(file).parts[0]}/**/*.py")}
    users = [tree / file]
    for user in users:  # which grows
        module = re.escape(".".join(user.relative_to(tree).with_suffix("").parts))
        new = {path: text for path, text in texts.items() if path not in users}
        users += [path for path, text in new.items() if re.search(rf"\b{module}\b", text)]
        for kernel in (user.parent / "__pycache__").glob(f"{user.stem}.*.nb?"):
            kernel.unlink()


def run_tests(tree: Path, area: Area, only: str = "", seconds: float | None = None) -> tuple[str, str]:
    """Return the outcome of a fault in a tree by the tests of an area, and the first test that fails."""
    chosen = " and ".join(f"({each})" for each in (area.only, only) if each)
    options = [*PYTEST.split(), "-m", MARKERS, "-k", chosen]
    command = [sys.executable, "-m", "pytest", *options, *area.tests]
    # The copy comes before the installed package; simulated ranks are threads already.
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=seconds, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return CAUGHT, f"no end within {seconds:.0f} s"
    if done.returncode == 0:
        return SURVIVED, ""
    if done.returncode in WITHOUT_RESULT:
        return UNUSABLE, WITHOUT_RESULT[done.returncode]
    if "Wrong expression passed to '-k'" in done.stderr:
        return UNUSABLE, f"pytest cannot read: {chosen}"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return CAUGHT, failed[1] if failed else "".join(last)


def copied(source: Path, target: Path) -> Path:
    """Copy a tree with its times and compiled files, so that only what changes is compiled again."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    return target


def examine(fault: Fault, area: Area, tree: Path, seconds: float) -> str:
    """Plant a fault in a copy of a tree whose tests pass in so many seconds; return the outcome."""
    start = time.monotonic()
    outcome, by = UNUSABLE, "its text is not there once"
    if fault.applies(tree):
        with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
            copy = copied(tree, Path(folder) / "tree")
            fault.plant(copy)
            outcome, by = run_tests(copy, area, fault.only, 2 * seconds + SPARE_SECONDS)
    taken = time.monotonic() - start
    print(f"{outcome:8} {taken:6.1f} s  {fault.area}: {fault.id}  {by}", flush=True)
    return outcome


def examine_all(faults: Sequence[Fault], areas: Mapping[str, Area], jobs: int) -> list[str]:
    """Return the outcome of each fault; those of an area whose tests fail without them do not apply."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, ThreadPoolExecutor(jobs) as pool:
        tree = copied(ROOT, Path(folder) / "tree")
        seconds = {}
        for name in dict.fromkeys(fault.area for fault in faults):
            start = time.monotonic()
            outcome, why = run_tests(tree, areas[name])
            taken = time.monotonic() - start
            if outcome == SURVIVED:
                seconds[name] = taken
            state = "pass" if outcome == SURVIVED else f"FAIL: {why}"
            print(f"{name}: the tests {state} ({taken:.1f} s)", flush=True)
        ready = [fault for fault in faults if fault.area in seconds]
        try:
            futures = [pool.submit(examine, one, areas[one.area], tree, seconds[one.area]) for one in ready]
            outcomes = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return outcomes + [UNUSABLE] * (len(faults) - len(ready))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--area", help="only the faults of this area")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the faults whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at once (default 2)")
    parser.add_argument("--faults", type=Path, default=FAULTS, metavar="FILE", help="another table of faults")
    given = parser.parse_args(arguments)
    areas, faults = load(given.faults)
    if given.area not in (None, *areas):
        parser.error(f"--area: expected one of {', '.join(areas)}, got {given.area}")
    chosen = [each for each in faults if given.area in (None, each.area) and given.only in each.id]
    if given.jobs < 1 or not chosen:
        parser.error(
            f"--jobs, --only: expected at least one job and one fault, got {given.jobs} and {len(chosen)}"
        )
    outcomes = examine_all(chosen, areas, given.jobs)
    counts = [f"{outcomes.count(each)} {each}" for each in (CAUGHT, SURVIVED, UNUSABLE)]
    print(f"{len(outcomes)} faults: {', '.join(counts)}")
    return int(outcomes.count(CAUGHT) < len(outcomes))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
