"""``cloudtrain cache``: one command after the other, on the folders of a configuration."""

import pytest

from tests.launching import DIGITS
from tests.training.refusal import invoke, refusal
from training.config.records import Cache
from training.run.data import cache_dirs_of


@pytest.fixture
def cache(tmp_path):
    """Return a function that runs a command of the cache on the digits, in folders of this test."""
    words = [f"cache.disk={tmp_path}/disk", f"cache.memory={tmp_path}/memory", "ranks_per_node=null"]

    def call(name, *more):
        return invoke("cache", name, DIGITS, *words, *more)

    return call


def test_a_folder_that_is_a_link_is_refused_in_one_line(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    line = refusal("cache", "build", DIGITS, f"cache={{memory: {link}}}")
    assert line.startswith(f"cache: {link}: expected a folder of user ")


def test_samples_are_built_listed_verified_repaired_and_removed(cache, tmp_path):
    assert cache("info").stdout == "nothing is stored here\n"
    built = cache("build")
    assert built.exit_code == 0, built.output
    assert built.stdout.splitlines() == [
        f"phase {phase}: {samples} of {samples} samples" for phase in (1, 2) for samples in ("1,437", "360")
    ]
    assert cache("build").stdout == ""  # all is there
    told = cache("info").stdout
    assert told.count("complete") == 6  # on disk two parts of the data, in memory two for each phase
    assert told.count(" no ") == 6
    assert cache("verify").exit_code == 0

    path = max(tmp_path.glob("disk/gen-*/records"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 2, len(data), 1000):
        data[place] ^= 255
    path.write_bytes(data)
    verified = cache("verify")
    assert verified.exit_code == 1
    assert sum(", 0 of" in line or ": 0 of" in line for line in verified.stdout.splitlines()) == 5
    repaired = cache("repair").stdout.splitlines()
    assert repaired[0] != "phase 1: 0 damaged records read again"
    assert repaired[1] == "phase 2: 0 damaged records read again"

    gone = cache("gc").stdout.splitlines()
    assert sum(": removed, " in line for line in gone) == 4
    assert sum("stays" in line for line in gone) == 2
    assert cache("clear").stdout.count(": removed, ") == 2
    assert cache("info").stdout == "nothing is stored here\n"


def test_without_folders_there_is_nothing_to_build():
    line = refusal("cache", "build", DIGITS, "cache.disk=null", "cache.memory=null")
    assert line == f"{DIGITS}: cache: expected a folder for disk or memory, got none"


def test_folders_are_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: 1234)
    auto = cache_dirs_of(Cache(disk="auto", memory="auto"))
    assert auto.disk == tmp_path / "cloudtrain" / "samples"
    assert str(auto.memory) == "/dev/shm/cloudtrain-1234"
    monkeypatch.setenv("HOME", "/home/me")
    given = cache_dirs_of(Cache(disk="~/samples"))
    assert (str(given.disk), given.memory) == ("/home/me/samples", None)
    monkeypatch.setenv("HOME", "")
    assert cache_dirs_of(Cache(memory="auto")).disk is None  # nobody asks for a folder at home
