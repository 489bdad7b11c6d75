"""Cluster files: the links, nodes and measured throughputs of a cluster that a run is planned for.

They are YAML, checked as configurations are; those that ship (``clusters/``) are found by name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import model_validator

from commlib import Link, Network
from training.config.reading import folder_of, located, problems_in_one_line, read
from training.config.schema import Count, Positive, Rate, Record, expect, is_number, problem

FOLDER = folder_of("clusters")
MOST_RANKS = 4096  # the bytes of each rank are added up
PAIRS = (("alpha", "beta"), ("microseconds", "gbit_per_second"))

Incast = Annotated[float, expect("a number from 1", lambda value: is_number(value) and value >= 1)]


class LinkRecord(Record):
    """A link: ``alpha`` and ``beta``, or ``microseconds`` and ``gbit_per_second``."""

    alpha: Rate | None = None
    """Seconds until the first byte arrives."""
    beta: Rate | None = None
    """Seconds a byte."""
    microseconds: Rate | None = None
    gbit_per_second: Positive | None = None
    incast: Incast = 1.0
    """How many times as long a byte takes where several nodes send to one."""

    @model_validator(mode="after")
    def _is_given_in_one_way(self) -> "LinkRecord":
        given = {name for pair in PAIRS for name in pair if getattr(self, name) is not None}
        if given not in [set(pair) for pair in PAIRS]:
            ways = " or ".join(" and ".join(pair) for pair in PAIRS)
            raise problem(f"expected {ways}, got {', '.join(sorted(given)) or 'none'}")
        return self

    @property
    def link(self) -> Link:
        """Return the link."""
        if self.alpha is not None and self.beta is not None:
            return Link(self.alpha, self.beta, self.incast)
        assert self.microseconds is not None  # both or none, as was checked
        assert self.gbit_per_second is not None
        return Link(self.microseconds * 1e-6, 8e-9 / self.gbit_per_second, self.incast)


class Throughput(Record):
    """How much one rank trains on in a second, alone, and what that was measured for.

    Keys that are not given fit everything.
    """

    per_second: Positive
    """In ``unit``."""
    model: str | None = None
    """As a configuration names it."""
    configuration: str | None = None
    """The ``name`` of a configuration."""
    phase: Count | None = None
    """Its number, from 1."""
    input: str | None = None
    """As a plan shows it: ``224 px``, ``128 tokens``."""
    unit: str | None = None
    """What batches are counted in, as a plan shows it: ``samples``, ``tokens``, ``windows``, ``streams``."""
    precision: Literal["float32", "float16", "bfloat16"] | None = None

    @model_validator(mode="after")
    def _is_of_something(self) -> "Throughput":
        if self.model is None and self.configuration is None:
            raise problem("expected model or configuration, got none")
        return self

    def fits(self, **facts: Any) -> bool:
        """Return whether all keys that are given equal these facts."""
        given = self.model_dump(exclude={"per_second"}, exclude_none=True)
        return all(facts.get(key) == value for key, value in given.items())


class ClusterFile(Record):
    """A cluster of equal nodes."""

    nodes: Count
    ranks_per_node: Count
    intra: LinkRecord | None = None
    """The link between two ranks of a node."""
    inter: LinkRecord | None = None
    """The link between nodes, each of which has one card."""
    throughput: Sequence[Throughput] = ()
    """The first entry that fits a phase counts."""
    memory_gib: Positive | None = None
    """Of a node."""
    gpu_memory_gib: Positive | None = None
    """Of a rank's GPU. Without it models and gradients are in the node's memory."""
    shm_gib: Positive | None = None
    """Of a node, for ``cache.memory``; by default half of its memory, as Linux has it."""
    disk_gib: Positive | None = None
    """Of a node, for ``cache.disk``."""
    price_per_node_hour: Rate | None = None
    """In any currency."""

    @model_validator(mode="after")
    def _is_complete(self) -> "ClusterFile":
        if self.ranks > MOST_RANKS:
            raise problem(f"expected at most {MOST_RANKS:,} ranks in all, got {self.ranks:,}", key="nodes")
        for key, count in (("intra", self.ranks_per_node), ("inter", self.nodes)):
            if count > 1 and getattr(self, key) is None:
                raise problem("missing, expected a link", key=key)
        return self

    @property
    def network(self) -> Network:
        """Return both links; a link that nothing uses has the default of ``Network``."""
        given = {"intra": self.intra, "inter": self.inter}
        return Network(**{name: each.link for name, each in given.items() if each is not None})

    @property
    def ranks(self) -> int:
        """Return how many ranks it has."""
        return self.nodes * self.ranks_per_node

    def per_second(self, **facts: Any) -> float | None:
        """Return the throughput that was measured for these facts, see :class:`Throughput`."""
        return next((each.per_second for each in self.throughput if each.fits(**facts)), None)


def load_cluster(given: str | Path) -> ClusterFile:
    """Return the cluster of a YAML file, or of one that ships, by its name.

    Raises ``ConfigurationError`` of one line that names file, key, value and what was expected.
    """
    content = read(located(given, "cluster", FOLDER))
    with problems_in_one_line(given):
        return ClusterFile.model_validate(content)
