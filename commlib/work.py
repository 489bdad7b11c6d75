"""What computing costs: the seconds an entry of each kernel, and how many entries a step has for each."""

from dataclasses import asdict, dataclass, fields

from commlib.errors import InvalidArgument


@dataclass(frozen=True)
class Speeds:
    """Seconds an entry for each kernel, on all ranks of a machine at the same time, until the last has ended.

    ``add``: of the sum of two dense vectors; ``fill``: of one that is set to 0. ``select``: of the vector
    that is accumulated and selected from; ``keep``: of those selected, beside that. ``place``: of a sparse
    vector that goes into a dense one. ``entry``: of a sparse vector that is added to others; ``code``: of one
    that is encoded and decoded, by ``wire``. ``shared``: whether ranks outnumber cores.
    """

    add: float
    fill: float
    select: float
    keep: float
    place: float
    entry: float
    code: dict[str, float]
    shared: bool = False

    def __post_init__(self) -> None:
        if not self.code:
            raise InvalidArgument("code: expected the seconds of one wire or more, got none")
        for name, seconds in (asdict(self) | self.code).items():
            if name != "code" and not 0 <= seconds < float("inf"):
                raise InvalidArgument(f"{name}: expected seconds from 0, got {seconds!r}")

    def with_waits(self, computing: float) -> float:
        """Return the seconds of a step that computes so long, with the waits of ranks for their core."""
        return computing + min(WAITING * computing, LONGEST_WAIT_SECONDS) if self.shared else computing


# Fitted to steps of docs/validation.md, where ranks outnumber two cores. A message takes as long as
# so many entries that are added up, beside its own, to be cut out, encoded, decoded and merged.
WAITING, LONGEST_WAIT_SECONDS = 0.6, 12e-3
ENTRIES_OF_A_MESSAGE = 32_000


@dataclass(frozen=True)
class Work:
    """What one rank computes: entries of each kind, as in :class:`Speeds`; ``coded`` in the step's codec.

    ``messages``: of entries, that the rank makes.
    """

    add: float = 0.0
    fill: float = 0.0
    select: float = 0.0
    keep: float = 0.0
    place: float = 0.0
    entry: float = 0.0
    coded: float = 0.0
    messages: float = 0.0

    @classmethod
    def selecting(cls, size: float, k: float) -> "Work":
        """Return the work to accumulate, to select, and to clear the selected entries of the residual."""
        return cls(select=size, keep=k, place=k)

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __mul__(self, times: float) -> "Work":
        return Work(*(getattr(self, each.name) * times for each in fields(self)))

    def seconds(self, speeds: Speeds, wire: str) -> float:
        if self.coded and wire not in speeds.code:
            measured = ", ".join(speeds.code)
            raise InvalidArgument(f"wire: expected one whose speed is known ({measured}), got {wire!r}")
        return (
            self.add * speeds.add
            + self.fill * speeds.fill
            + self.select * speeds.select
            + self.keep * speeds.keep
            + self.place * speeds.place
            + (self.entry + self.messages * ENTRIES_OF_A_MESSAGE) * speeds.entry
            + self.coded * speeds.code.get(wire, 0.0)
        )
