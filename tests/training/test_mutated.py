"""Mutated checkpoints are left out, or are whole; nothing in them is executed."""

import builtins
import json
import os
import pickle
import random
import shutil
import subprocess
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from tests.extent import ALL
from tests.training.stored import COMPLETE, OWN, SHARED, manifest_of, newest, save_whole, write_manifest
from tests.training.test_checkpoints import own_tree, same, shared_tree
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


def mutate(folder, chance):
    """Change one file of a checkpoint, and all digests with it."""
    name = chance.choice([COMPLETE, SHARED, OWN.format(0)])
    manifest = manifest_of(folder)
    if name == COMPLETE:
        manifest = changed(manifest, chance)
    else:
        content = mutate_header((folder / name).read_bytes(), chance)
        (folder / name).write_bytes(content)
        manifest["files"][name] = {"bytes": len(content), "digest": xxh3_128_hexdigest(content)}
    write_manifest(folder, json.dumps(manifest))


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
        mutate(folder / last, chance)
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

    body()
    assert min(found.values()) > 0
