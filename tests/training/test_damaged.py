"""A damaged profile is refused in one line of bounded length, or is used."""

import json
import random

from commlib import InvalidArgument, Link, Network, Topology
from commlib.cost import Speeds
from commlib.errors import LONGEST_LINE
from commlib.transport import simulated
from commlib.tuning.probe import WIRES, Candidate, Profile, Trial, job_of
from tests.extent import ALL
from tests.launching import DIGITS
from training.config.config import load
from training.run.autotune import choose_reducers

TRIES = 600 if ALL else 100
TOO_LONG = 2 * LONGEST_LINE  # with what is escaped


def line_of(error: BaseException) -> str:
    """Return the message, of which no terminal sees more than a line."""
    line = str(error)
    assert line.isprintable(), line
    assert len(line) < TOO_LONG
    return line


NUMBERS = [
    *("-1", "0", "1e400", ".nan", "9" * 400, "true", "1_000", "0x_", "1e-400", "2147483648", "''", "null")
]
TEXTS = [
    *("${a}", "${seed}", "${phases}", "${.}", "${..}", "\x00", "\x1b[2J", "\ud7ff", "é" * 50, "x" * 5000),
    *("~", "=", "<<"),
]
MARKS = [
    *("[", "]", "{", "}", ": ", "- ", "&a ", "*a", "!!int ", "|", ">", "'", '"', "\n", "\t", "#", ",", "? "),
    *("%", "---\n"),
]


def damaged(text: str, chance: random.Random) -> str:
    """Return a text with one to four of its places changed."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text) + 1)
        until = min(len(text), at + chance.choice([0, 0, 1, 3, 30]))
        piece = chance.choice(
            [
                "",
                chance.choice(NUMBERS),
                chance.choice(TEXTS),
                chance.choice(MARKS),
                chance.choice(MARKS) * 40,
                text[chance.randrange(len(text) + 1) :][: chance.randint(0, 60)],
                chr(chance.randrange(1, 0x2FF)),
            ]
        )
        text = text[:at] + piece + text[until:]
    return text


def whole_profile(topology: Topology) -> Profile:
    speeds = Speeds(1e-9, 1e-9, 1e-9, 1e-8, 1e-8, 1e-8, dict.fromkeys(WIRES, 1e-9))
    links = [Link.of(microseconds=5, gbit_per_second=rate) for rate in (100, 1)]
    trials = (Trial(Candidate("hitopk", "fp32"), 1000, 0.01, 0.5), Trial(Candidate("dense"), 1000, 0.01, 0.1))
    return Profile(job_of(topology), Network(*links), speeds, trials)


def changed(content, chance: random.Random):
    """Return a copy of what JSON holds with one value changed, lost or repeated."""
    if isinstance(content, dict) and content and chance.random() < 0.8:
        key = chance.choice(list(content))
        kind = chance.random()
        rest = {name: value for name, value in content.items() if name != key}
        if kind < 0.1:
            return rest
        return {**rest, key if kind < 0.9 else f"{key}\x1b": changed(content[key], chance)}
    if isinstance(content, list) and content and chance.random() < 0.8:
        at = chance.randrange(len(content))
        return [
            *content[:at],
            *chance.choice([[], [changed(content[at], chance)], content]),
            *content[at + 1 :],
        ]
    numbers = (-1, 0, 1e308, 10**400, 5e-324, float("nan"), float("inf"))
    return chance.choice([None, True, "x" * 5000, "\x1b[31m", *numbers, [], {}, [[]]])


def test_a_damaged_profile_is_used_or_refused_in_one_line(tmp_path):
    path = tmp_path / "profile.json"
    chance = random.Random(15)

    def damage(number: int) -> str:
        text = path.read_text()
        if number % 3 == 0:
            return damaged(text, chance)
        content = json.loads(text)
        return json.dumps(changed(content, chance)) if number else "[" * 100_000

    def body(comm):
        topology = Topology(comm, ranks_per_node=1)
        config = load(DIGITS, ["reducer={name: auto, density: 0.01}", f"profile={path}"])
        counts = {"used": 0, "refused": 0}
        whole = whole_profile(topology)
        for number in range(TRIES):
            if comm.rank == 0:
                whole.save(path)
                path.write_bytes(damage(number).encode("utf-8", "surrogatepass"))
            comm.barrier()
            try:
                profile = Profile.load(path)
                profile.check(whole.job)
            except InvalidArgument as error:
                line_of(error)
                profile = None
            comm.barrier()
            if profile is None:
                counts["refused"] += 1
                continue
            try:
                choices = choose_reducers(config, topology, profile, 1000)
            except ValueError as error:
                counts["refused"] += "to measure again" in line_of(error)
            else:
                counts["used"] += len(choices) == 1
        return counts

    counts, other = simulated.run(body, 2)
    assert counts == other
    assert sum(counts.values()) == TRIES
    assert counts["used"] > TRIES / 50
    assert counts["refused"] > TRIES / 2
