"""How a bench prints its records: lines of JSON as soon as they are measured, or tables at the end."""

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Any

from benchmarks.jobs import Failed
from commlib import Communicator
from training.bench.checks import WrongResult
from training.bench.record import Record, print_lines
from training.process.job import FAILURE, INTERRUPTED, exit_all, log_error

JSONRecord = dict[str, Any]  # a record as its line has it


def report(
    records: Iterable[Record],
    *,
    as_json: bool,
    show: Callable[[list[Record]], None],
    comm: Communicator | None = None,
) -> int:
    """Measure on all ranks of ``comm``, if there is one, and print on rank 0; return the exit status.

    ``records`` measures while it is gone through; ``show`` prints the tables of all.
    """
    prints = comm is None or comm.rank == 0
    try:
        if as_json and prints:
            print_lines(records)
        else:
            measured = list(records)
            if prints:
                show(measured)
    except WrongResult as error:  # on all ranks, in the same step
        if prints:
            log_error(str(error))
        if comm is not None:
            exit_all(comm, FAILURE)
        return FAILURE
    return 0


def report_cases(
    cases: Iterable[list[Record]], *, as_json: bool, show: Callable[[list[Record]], None]
) -> int:
    """Print each case as soon as it is measured, and return the exit status."""
    try:
        for records in cases:
            if as_json:
                print_lines(records)
            else:
                show(records)
    except WrongResult as error:
        log_error(str(error))
        return FAILURE
    return 0


def with_peers(reported: JSONRecord, peers: Sequence[JSONRecord]) -> JSONRecord:
    """Return a reducer's record against these peers as well; the fastest of all becomes its peer.

    Records of anything else are returned as they are.
    """
    if "baselines" not in reported:
        return reported
    baselines = reported["baselines"] | {each["subject"]: each["seconds"] for each in peers}
    names = [reported["peer"], *(each["subject"] for each in peers)]
    peer = min(names, key=lambda name: baselines[name]["median"])
    seconds, own = baselines[peer], reported["seconds"]["median"]
    ratio = seconds["median"] / own if own else None
    return reported | {"baselines": baselines, "peer": peer, "peer_seconds": seconds, "ratio": ratio}


def pass_on(
    reported: Generator[JSONRecord, None, None], *, as_json: bool, show: Callable[[list[JSONRecord]], None]
) -> int:
    """Print the records that jobs report, and return the exit status; tables also of an incomplete sweep.

    ``reported`` runs the jobs while it is gone through, and ends them when it is closed.
    """
    so_far: list[JSONRecord] = []
    try:
        with closing(reported):
            for each in reported:
                so_far.append(each)
                if as_json:
                    print(json.dumps(each, allow_nan=False, ensure_ascii=False), flush=True)
    except Failed as failure:
        log_error(str(failure))
        return FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if not as_json:
            show(so_far)
    return 0
