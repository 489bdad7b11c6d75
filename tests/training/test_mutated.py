"""Mutated checkpoints are left out, or are whole; nothing in them is executed."""

import builtins
import json
import os
import pickle
import random
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128, xxh3_128_hexdigest

from tests.extent import ALL
from tests.training.stored import newest, save_whole
from tests.training.test_checkpoints import COMPLETE, OWN, SHARED, own_tree, same, shared_tree
from tests.training.test_damaged import changed
from training.checkpoint import serialization
from training.checkpoint.folders import Checkpoints
from training.checkpoint.places import Folder

# Kinds of values that no test may reach, in a process that reads what a stranger could have written.
EXECUTING = ((builtins, "exec"), (builtins, "eval"), (os, "system"), (subprocess, "Popen"))
UNPICKLING = ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"))


@contextmanager
def nothing_is_executed(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was executed")

    "\0".encode("unicode_escape")  # imports the codec, which would be executed at the first line printed
    with monkeypatch.context() as patched:
        for module, name in EXECUTING + UNPICKLING:
            patched.setattr(module, name, refuse)
        yield


# --------------------------------------------------------------------------------------- checkpoints


def mutate_bytes(content: bytes, chance: random.Random) -> bytes:
    """Return it with flipped bits, cut off, with a part repeated, lost or of zeros, or longer."""
    at = chance.randrange(len(content))
    until = min(len(content), at + chance.choice([1, 8, 100]))
    flipped = bytes([content[at] ^ 1 << chance.randrange(8)])
    return chance.choice(
        [
            content[:at] + flipped + content[at + 1 :],
            content[:at],
            content[:at] + content[until:],
            content[:until] + content[at:],
            content[:at] + bytes(until - at) + content[until:],
            content + chance.randbytes(chance.choice([1, 100])),
            content[:at] + chance.randbytes(until - at) + content[until:],
        ]
    )


def mutate_header(content: bytes, chance: random.Random) -> bytes:
    """Return a file of a tree with a value of its header changed, or of the tree that the header holds."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if chance.random() < 0.5:
        tree = changed(json.loads(header["__metadata__"]["tree"]), chance)
        header["__metadata__"]["tree"] = json.dumps(tree)
    else:
        header = changed(header, chance)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def sign(folder, name):
    """Give the manifest the length and digest of a file as it is now, as another program would."""
    body = json.loads((folder / COMPLETE).read_bytes().split(b"\n")[0])
    content = (folder / name).read_bytes()
    body["files"][name] = asdict(serialization.Written(len(content), xxh3_128(content).hexdigest()))
    write_manifest(folder, json.dumps(body).encode())


def write_manifest(folder, body):
    (folder / COMPLETE).write_bytes(body + b"\n" + f"{xxh3_128_hexdigest(body)}\n".encode())


def mutate(folder, chance):
    """Change one file of a checkpoint; return whether its digests are right afterwards."""
    name = chance.choice([COMPLETE, SHARED, OWN.format(0)])
    content, signed = (folder / name).read_bytes(), chance.random() < 0.6
    if not signed:
        (folder / name).write_bytes(mutate_bytes(content, chance))
    elif name == COMPLETE:
        write_manifest(folder, json.dumps(changed(json.loads(content.split(b"\n")[0]), chance)).encode())
    else:
        change = mutate_header if chance.random() < 0.7 else mutate_bytes
        (folder / name).write_bytes(change(content, chance))
        sign(folder, name)
    return signed and (folder / name).read_bytes() != content


def test_mutated_checkpoints_are_left_out_or_whole_and_nothing_is_executed(
    tmp_path, capsys, monkeypatch, alone
):
    """With a right digest only the form is checked: a file without a tree is left out, any tree is taken."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    store = Checkpoints(Folder(whole), alone, run="this")
    for step in (1, 2):
        save_whole(store, step, shared_tree(step), own_tree(step, 0))
    shutil.copytree(whole, folder)
    last = "step-00000002"
    found = {1: 0, 2: 0}

    @given(chance=st.randoms(use_true_random=False))
    @settings(max_examples=10_000 if ALL else 150)
    def body(chance):
        for file in (whole / last).iterdir():
            (folder / last / file.name).write_bytes(file.read_bytes())
        is_signed = mutate(folder / last, chance)
        capsys.readouterr()
        with nothing_is_executed(monkeypatch):
            checkpoint = newest(Checkpoints(Folder(folder), alone, run="this"))
        lines = capsys.readouterr().err.splitlines()
        found[checkpoint.step] += 1
        if checkpoint.step == 1:
            assert same(checkpoint.shared, shared_tree(1))
            assert same(checkpoint.own, own_tree(1, 0))
            (line,) = lines
            assert line.isprintable(), line
            assert " is left out: " in line
        elif not is_signed:
            assert same(checkpoint.shared, shared_tree(2))
            assert same(checkpoint.own, own_tree(2, 0))

    body()
    assert min(found.values()) > 0


def test_what_would_execute_is_noticed(monkeypatch):
    with nothing_is_executed(monkeypatch), pytest.raises(AssertionError, match="something was executed"):
        pickle.loads(pickle.dumps(1))  # noqa: S301
