"""How far ratios move between records of one kind: other days, other machines."""

from collections.abc import Iterator, Sequence

from benchmarks.drawing.cluster import world
from benchmarks.drawing.results import Results
from training.bench.record import Record
from training.bench.tables import NOTHING, label, percent
from training.commands.printing import markdown, milliseconds, times

Numbers = dict[str, float]  # by the name of a column


def tables(results: Results) -> Iterator[str]:
    """Yield a table of lowest and highest numbers of cases that earlier records have, too."""
    records = [*results.earlier, results]
    found = [{place_of(each): numbers_of(each, every) for each in every.records} for every in records]
    again = [place for place in found[-1] if any(place in each for each in found[:-1])]
    columns = list(dict.fromkeys(name for place in again for name in found[-1][place]))
    if not columns:
        return
    yield "### Between machines\n"
    where = ", ".join(f"{each.where} ({each.link})" for each in records)
    yield f"Lowest and highest of the records of {where}.\n"
    rows = []
    for place in again:
        numbers = [each[place] for each in found if place in each]
        rows.append([*place, *(range_of(name, numbers) for name in columns)])
    yield markdown(["", "entries", "density", "measured", *columns], rows)


def place_of(record: Record) -> tuple[str, str, str, str]:
    """Return the case of a measurement, which others of its kind may share."""
    case = record.case
    measured = case.get("input") or f"{case['rate']}, {world(case['ranks_of_nodes'])}"
    return f"`{label(record)}`", f"{case['size']:,}", percent(case["density"]), measured


def numbers_of(record: Record, results: Results) -> Numbers:
    """Return the ratios of a record; of selections those of all records of the same."""
    if (baselines := record.more.get("baselines")) is not None:
        own, bare = record.seconds.median, baselines["bare"]["median"]
        return {"× peer": record.ratio or 0.0, "× bare": bare / own, "bare ms": bare}
    own = [each for each in results.records if place_of(each) == place_of(record)]
    return {f"× {each.peer}": each.ratio for each in own if each.ratio is not None}


def range_of(name: str, numbers: Sequence[Numbers]) -> str:
    """Return the lowest and the highest of a column.

    >>> range_of("× read", [{"× read": 0.5}, {"× read": 0.25}, {}]), range_of("× read", [{}])
    ('0.25 to 0.5', '–')
    """
    show = milliseconds if name.endswith(" ms") else times
    given = sorted(each[name] for each in numbers if name in each)
    return f"{show(given[0])} to {show(given[-1])}" if given else NOTHING
