"""The cost of computing: the seconds per entry of each kernel, and the entries a step gives to each."""

from dataclasses import asdict, dataclass, fields

from commlib.errors import InvalidArgument


@dataclass(frozen=True)
class Speeds:
    """Seconds per entry of each kernel, while all ranks run it at the same time, on the slowest rank.

    ``add``: to add two dense vectors; ``fill``: to set a dense vector to 0. ``select``: to accumulate the
    gradient and search it for the largest entries; ``keep``: extra time for each selected entry. ``place``:
    to write a sparse vector's entries to a dense one. ``entry``: to add up sparse vectors; ``code``: to
    encode and decode a sparse vector, by ``wire``. ``ranks_per_core``: at least 1.
    """

    add: float
    fill: float
    select: float
    keep: float
    place: float
    entry: float
    code: dict[str, float]
    ranks_per_core: float = 1.0

    def __post_init__(self) -> None:
        if not self.code:
            raise InvalidArgument("code: expected the seconds of one wire or more, got none")
        for name, seconds in (asdict(self) | self.code).items():
            if name != "code" and not 0 <= seconds < float("inf"):
                raise InvalidArgument(f"{name}: expected seconds from 0, got {seconds!r}")

    def with_waits(self, computing: float) -> float:
        """Return the seconds of a step that computes so long, with the waits of ranks for their core."""
        if self.ranks_per_core <= 1:
            return computing
        wait = WAITING * self.ranks_per_core**0.25 * computing
        return computing + min(wait, LONGEST_WAIT_SECONDS * self.ranks_per_core)


# Fitted to steps of docs/validation.md, where two or four ranks share a core. Besides its entries, a message
# takes as long to cut out, encode, decode and merge as it takes to add up ENTRIES_OF_A_MESSAGE entries.
WAITING, LONGEST_WAIT_SECONDS = 0.5, 6e-3
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
