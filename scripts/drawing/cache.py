"""Times of batches from each level of the cache."""

from collections.abc import Iterator
from pathlib import Path

from scripts.drawing.results import Results
from scripts.drawing.style import STAGES, WHOLE, picture
from scripts.drawing.text import NOTHING, microseconds, table
from training.commands.printing import times

TEXT = """## Batches from the cache

JPEGs of 500 × 375 pixels and about 110 KB in central storage, which is emulated; the time of a sample, in
whole batches of crops. `levels` is from the second epoch on, with two threads but for one core;
`first epoch` begins with empty folders.

![µs a sample](cache.svg)
"""


def tables(results: Results) -> Iterator[str]:
    """Yield the table of the time of a sample, after a line about the samples."""
    case, more = results.records[0].case, results.records[0].more
    storage = f"{case['rate']}, {case['latency_seconds'] * 1e3:g} ms a request"
    sizes = f"stored with a shorter side of {case['kept_side']}, cropped to {case['input_size']} pixels"
    yield f"{case['samples']:,} samples, batches of {case['batch']}, {sizes}; storage: {storage}.\n"
    yield f"Level 2 takes {more['memory_ratio']:.3f} times its samples' bytes, once a node.\n"
    rows = [
        [
            *(each.subject, microseconds(each.seconds.median), each.peer or NOTHING),
            microseconds(each.peer_seconds.median) if each.peer_seconds else NOTHING,
            times(each.ratio),
        ]
        for each in results.records
    ]
    yield table(["", "µs", "baseline", "µs", "× as fast"], rows)


def draw(results: Results, path: Path) -> None:
    """Write the picture of the time of a sample: a bar for each subject and peer."""
    seconds = {each.subject: each.seconds.median for each in results.records}
    subjects = set(seconds)
    seconds |= {each.peer: each.peer_seconds.median for each in results.records if each.peer_seconds}
    bars_of = sorted(seconds.items(), key=lambda each: each[1])
    with picture(path, 6.4, 2.4, results.fingerprint) as figure:
        axes = figure.subplots()
        colors = [STAGES["select"] if name in subjects else WHOLE for name, _ in bars_of]
        axes.barh([name for name, _ in bars_of], [each * 1e6 for _, each in bars_of], color=colors)
        for place, (_, each) in enumerate(bars_of):
            text = microseconds(each)
            axes.annotate(text, (each * 1e6, place), (3, 0), textcoords="offset points", va="center")
        axes.set_xscale("log")
        axes.set_xlabel("µs a sample")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
