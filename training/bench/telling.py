"""How a bench tells what it measures: lines of JSON as soon as they are there, or tables at the end."""

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Any

from commlib import Communicator
from training.bench.checks import WrongResult
from training.bench.jobs import Failed
from training.bench.record import Record, print_lines
from training.job import FAILURE, complain, leave
from training.launch import INTERRUPTED

Told = dict[str, Any]  # a record as its line has it


def tell(
    records: Iterable[Record],
    *,
    as_json: bool,
    show: Callable[[list[Record]], None],
    comm: Communicator | None = None,
) -> int:
    """Measure on all ranks of ``comm``, if there is one, and print on rank 0; return the exit status.

    ``records`` measures while it is gone through; ``show`` prints the tables of all.
    """
    speaks = comm is None or comm.rank == 0
    try:
        if as_json and speaks:
            print_lines(records)
        else:
            measured = list(records)
            if speaks:
                show(measured)
    except WrongResult as error:  # on all ranks, in the same step
        if speaks:
            complain(str(error))
        if comm is not None:
            leave(comm, FAILURE)
        return FAILURE
    return 0


def with_peers(told: Told, peers: Sequence[Told]) -> Told:
    """Return a reducer's record beside these peers as well; the fastest of all becomes its peer.

    Records of anything else are returned as they are.
    """
    if "beside" not in told:
        return told
    beside = told["beside"] | {each["subject"]: each["seconds"] for each in peers}
    names = [told["peer"], *(each["subject"] for each in peers)]
    peer = min(names, key=lambda name: beside[name]["median"])
    seconds, own = beside[peer], told["seconds"]["median"]
    ratio = seconds["median"] / own if own else None
    return told | {"beside": beside, "peer": peer, "peer_seconds": seconds, "ratio": ratio}


def pass_on(told: Generator[Told, None, None], *, as_json: bool, show: Callable[[list[Told]], None]) -> int:
    """Print the records that jobs tell, and return the exit status; tables also of what broke off.

    ``told`` runs the jobs while it is gone through, and ends them when it is closed.
    """
    so_far: list[Told] = []
    try:
        with closing(told):
            for each in told:
                so_far.append(each)
                if as_json:
                    print(json.dumps(each, allow_nan=False, ensure_ascii=False), flush=True)
    except Failed as failure:
        complain(str(failure))
        return FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if not as_json:
            show(so_far)
    return 0
