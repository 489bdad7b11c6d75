"""Columns of samples: what is kept, what is refused, and what changes a fingerprint."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.manifest import Manifest, Texts


def manifest(**changes) -> Manifest:
    columns = {
        "payload": "image",
        "files": Texts.of(["a/ä.jpg", "b/2.jpg"]),
        "stamps": np.array([2**64 - 1, 7], np.uint64),
        "file": np.array([0, 1, 1]),
        "start": np.array([0, 0, 50]),
        "sizes": np.array([10, 20, 30]),
        "labels": np.array([0, 1, 1]),
        "classes": ("a", "b"),
        "shape": (2, 3, 1),
        "more": {"extra": np.array([4, 5, 6])},
    }
    return Manifest(**{**columns, **changes})


COLUMNS = ["stamps", "file", "start", "sizes", "labels"]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.binary(max_size=8))
def test_texts_are_the_strings_they_were_made_of(strings, key):
    strings = [*strings, key.decode("utf-8", "surrogateescape")]
    texts = Texts.of(strings)
    assert list(texts) == strings
    assert texts[-1].encode("utf-8", "surrogateescape") == key
    assert list(texts[1:]) == strings[1:]
    with pytest.raises(IndexError):
        texts[len(strings)]


def test_what_was_saved_is_loaded(tmp_path):
    saved = manifest()
    saved.save(tmp_path / "manifest")
    loaded = Manifest.load(tmp_path / "manifest")
    assert [path.name for path in tmp_path.iterdir()] == ["manifest"]
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(saved, name), strict=True)
    np.testing.assert_array_equal(loaded.more["extra"], [4, 5, 6])
    assert loaded.files == saved.files
    assert (loaded.payload, loaded.classes, loaded.shape) == ("image", ("a", "b"), (2, 3, 1))
    assert len(loaded) == 3
    assert loaded.fingerprint == saved.fingerprint


def test_the_fingerprint_is_the_same_on_every_machine():
    assert manifest().fingerprint == "359eb9fa74342893cb38c77ba9cd3c8f"


@pytest.mark.parametrize(
    "changes",
    [
        *({name: [*getattr(manifest(), name)[:-1], 0]} for name in COLUMNS),
        {"payload": "array"},
        {"files": Texts.of(["a/ä.jp", "gb/2.jpg"])},
        {"classes": ("a", "c")},
        {"shape": (3, 2, 1)},
        {"shape": None},
        {"more": {}},
        {"more": {"extra": np.array([4, 5, 7])}},
        {"more": {"other": np.array([4, 5, 6])}},
    ],
)
def test_everything_counts_for_the_fingerprint(changes):
    assert manifest(**changes).fingerprint != manifest().fingerprint


def test_copies_of_the_same_files_have_the_same_samples_whatever_their_times():
    copy = manifest(stamps=np.array([1, 2], np.uint64))
    assert copy.fingerprint != manifest().fingerprint
    assert copy.samples_fingerprint() == manifest().samples_fingerprint()
    other = manifest(labels=np.array([0, 1, 0]))
    assert other.samples_fingerprint() != manifest().samples_fingerprint()


def test_columns_cannot_be_written():
    column = np.array([10, 20, 30])
    kept = manifest(sizes=column)
    with pytest.raises(ValueError, match="read-only"):
        kept.sizes[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        kept.labels = column


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array([0, 1])}, r"labels: expected shape \(3,\), got \(2,\)"),
        ({"more": {"extra": np.array([1])}}, r"extra: expected shape \(3,\), got \(1,\)"),
        ({"stamps": np.array([1], np.uint64)}, r"stamps: expected shape \(2,\), got \(1,\)"),
        ({"file": np.array([0, 1, 2])}, r"file: expected 0 … 1, got 0 … 2"),
        ({"start": np.array([0, -1, 2])}, r"expected no negative numbers"),
        ({"labels": np.array([0, 1, 2])}, r"labels: expected 0 … 1, got 0 … 2"),
        ({"sizes": np.array([], int)}, r"expected at least one sample, got none"),
    ],
)
def test_columns_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        manifest(**changes)


def test_a_file_damaged_anywhere_is_refused_in_one_line(tmp_path):
    path = tmp_path / "manifest"
    manifest().save(path)
    whole = path.read_bytes()
    generator = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[generator.integers(len(whole))] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        try:
            loaded = Manifest.load(path)
        except ValueError as error:
            assert str(error).startswith(f"{path}: not a manifest, or a damaged one; delete it")
            assert "\n" not in str(error)
            refused += 1
        else:  # a bit of the archive that means nothing, such as a date
            assert loaded.fingerprint == manifest().fingerprint
    assert refused > 200


def test_a_whole_archive_with_another_column_than_was_saved_is_refused(tmp_path):
    path = tmp_path / "manifest"
    manifest().save(path)
    with np.load(path) as archive:
        columns = dict(archive)
    columns["labels"] = manifest(labels=[0, 1, 0]).labels.view(np.uint8)
    with path.open("wb") as file:
        np.savez(file, **columns)  # the archive's own checksums fit
    with pytest.raises(ValueError, match="damaged one; .*its fingerprint does not match"):
        Manifest.load(path)


def test_a_file_of_another_format_is_refused_as_such(tmp_path):
    path = tmp_path / "manifest"
    facts = json.dumps({"format": 99}).encode()
    with path.open("wb") as file:
        np.savez(file, facts=np.frombuffer(facts, np.uint8))
    with pytest.raises(ValueError, match="manifest of format 99, expected 1; delete it"):
        Manifest.load(path)
