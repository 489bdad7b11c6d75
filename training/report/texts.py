"""Numbers as a report writes them."""

from collections.abc import Callable

from training.tasks import TASKS
from training.tasks.task import Metric

NOTHING = "–"
# What is known of metrics, by name: those of all tasks that ship.
METRICS: dict[str, Metric] = {name: each for task in TASKS.values() for name, each in task.metrics.items()}


def shown_by(metric: str) -> Callable[[float], str]:
    """Return what writes the values of a metric: shares in percent."""
    known = METRICS.get(metric)
    return percent if known is not None and known.share else plain


def plain(value: float) -> str:
    """Return a number with four digits, a large one as a whole number.

    >>> plain(0.123456), plain(64012.7), plain(1e300)
    ('0.1235', '64,013', '1e+300')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def percent(value: float) -> str:
    """Return a share.

    >>> percent(0.98611)
    '98.61 %'
    """
    return f"{100 * value:.2f} %" if abs(value) < 100 else f"{100 * value:.3g} %"


def bytes_shown(value: float) -> str:
    """Return a number of bytes in decimal units.

    >>> bytes_shown(512), bytes_shown(1_234_567), bytes_shown(5.6e10)
    ('512 B', '1.23 MB', '56.0 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{value:#.3g} {unit}".replace(". ", " ")
        value /= 1000
    return f"{value:,.3g} TB"


def duration(seconds: float) -> str:
    """Return a time.

    >>> duration(0.0123), duration(41.23), duration(3725), duration(200_000)
    ('12.3 ms', '41.2 s', '1:02:05 h', '55:33:20 h')
    """
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds >= 1e8:
        return f"{seconds:.3g} s"
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02} h" if hours else f"{minutes}:{left:02} min"
