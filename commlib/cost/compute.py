"""What a rank computes in one step, and how long that takes with the measured speeds of a machine's kernels.

A step is taken as its passes over dense vectors, the entries that it selects from and selects, and how often
each sparse entry is handled: cut, encoded, decoded, added up, written to its index.
"""

from dataclasses import asdict, dataclass, fields

from commlib.errors import InvalidArgument


@dataclass(frozen=True)
class Speeds:
    """Seconds for one entry on every rank of a machine, until the last one has done it.

    ``add``: of the sum of two dense vectors; ``fill``: of a vector of zeros. ``select``: of the vector that
    is accumulated and selected from; ``keep``: of those selected, beside that. ``place``: of a sparse vector
    that goes into a dense one. ``entry``: of a sparse vector that is added to others; ``code``: of one that
    is encoded and decoded, by ``wire``.
    """

    add: float
    fill: float
    select: float
    keep: float
    place: float
    entry: float
    code: dict[str, float]

    def __post_init__(self) -> None:
        if not self.code:
            raise InvalidArgument("code: expected the seconds of one wire or more, got none")
        for name, seconds in (asdict(self) | self.code).items():
            if name != "code" and not 0 <= seconds < float("inf"):
                raise InvalidArgument(f"{name}: expected seconds from 0, got {seconds!r}")


@dataclass(frozen=True)
class Work:
    """What one rank computes: entries of each kind, as in :class:`Speeds`; ``coded`` in the step's codec."""

    add: float = 0.0
    fill: float = 0.0
    select: float = 0.0
    keep: float = 0.0
    place: float = 0.0
    entry: float = 0.0
    coded: float = 0.0

    @classmethod
    def selecting(cls, size: float, k: float) -> "Work":
        """Return the work to accumulate and select, and to take what was selected out of the residual."""
        return cls(select=size, keep=k, place=k)

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def seconds(self, speeds: Speeds, wire: str) -> float:
        """Return how long that takes."""
        if self.coded and wire not in speeds.code:
            measured = ", ".join(speeds.code)
            raise InvalidArgument(f"wire: expected one whose speed is known ({measured}), got {wire!r}")
        return (
            self.add * speeds.add
            + self.fill * speeds.fill
            + self.select * speeds.select
            + self.keep * speeds.keep
            + self.place * speeds.place
            + self.entry * speeds.entry
            + self.coded * speeds.code.get(wire, 0.0)
        )
