"""Names that others have chosen, as they reach terminals and logs."""

import os

import numpy as np
import pytest

from datacache import stand_in_lines
from datacache.errors import BadSample, Damaged, SourceChanged, StorageFailed
from datacache.escaping import escaped
from datacache.manifest import Manifest, Texts

HOSTILE = os.fsdecode(b"n01/\x1b[2J\xff\n\xc2\x9b.png")
SHOWN = r"n01/\x1b[2J\xff\n\x9b.png"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("n01440764/Größe 7.JPEG", "n01440764/Größe 7.JPEG"),
        (HOSTILE, SHOWN),
        ("a\tb\rc\0", r"a\tb\rc\x00"),
        ("left\u202eright\u2028next\ufeff", r"left\u202eright\u2028next\ufeff"),
        ("\ud800 alone", r"\ud800 alone"),
        (r"C:\temp\new", r"C:\temp\new"),
    ],
)
def test_what_cannot_be_printed_is_escaped_once(text, shown):
    assert escaped(text) == shown
    assert escaped(shown) == shown
    assert shown.isprintable()
    shown.encode("utf-8")


@pytest.mark.parametrize("error", [BadSample, Damaged, SourceChanged, StorageFailed])
def test_errors_that_name_files_can_be_printed(error):
    assert str(error(f"{HOSTILE}: gone")) == f"{SHOWN}: gone"


def test_the_line_of_a_sample_that_another_stood_in_for_can_be_printed():
    manifest = Manifest(
        payload="image",
        files=Texts.of([HOSTILE, "n01/2.png"]),
        stamps=np.zeros(2, np.uint64),
        file=np.arange(2, dtype=np.int32),
        start=np.zeros(2, np.int64),
        sizes=np.ones(2, np.int64),
        labels=np.zeros(2, np.int32),
    )
    line = f"{SHOWN} (sample 0) cannot be decoded: n01/2.png (sample 1) stood in"
    assert stand_in_lines(manifest, [{0: 1}]) == [line]
