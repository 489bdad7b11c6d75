"""Files in LibSVM's format: each rank reads the lines that begin in its bytes; what is wrong is one line."""

import numpy as np
import pytest
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

from commlib import Topology
from commlib.transport import simulated
from tests.linear.made import matrix_of
from training.linear.rows import FilePart, read_rows


def read(path, ranks, **options):
    return simulated.run(lambda comm: read_rows(path, Topology(comm), **options), ranks)


@pytest.mark.parametrize("zero_based", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_all_ranks_together_have_the_rows_of_the_file_once(tmp_path, world_size, zero_based):
    matrix, labels = matrix_of(0)
    path = tmp_path / "rows"
    dump_svmlight_file(matrix, (labels + 1) // 2, str(path), zero_based=zero_based)
    expected, _ = load_svmlight_file(str(path), zero_based=zero_based)
    parts = read(path, world_size, zero_based=zero_based)
    assert {part.features for part in parts} == {expected.shape[1]}
    assert all(len(part) for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), labels)
    np.testing.assert_array_equal(np.concatenate([part.matrix.columns for part in parts]), expected.indices)
    np.testing.assert_allclose(
        np.concatenate([part.matrix.values for part in parts]), expected.data, rtol=1e-6
    )
    lengths = np.concatenate([np.diff(part.matrix.starts) for part in parts])
    np.testing.assert_array_equal(lengths, np.diff(expected.indptr))


def test_a_rank_reads_its_own_bytes_only(tmp_path):
    lines = [f"{1 - 2 * (at % 2)} {at + 1}:1\n" for at in range(1000)]
    path = tmp_path / "rows"
    path.write_text("".join(lines))
    parts = [FilePart.of_rank(path, rank, 7) for rank in range(7)]
    read = [list(part) for part in parts]
    assert b"".join(line for own in read for line in own) == path.read_bytes()
    assert [part.low for part in parts[1:]] == [part.high for part in parts[:-1]]
    assert max(map(len, read)) < 1000 / 7 * 1.3


def test_comments_and_empty_lines_are_no_rows(tmp_path):
    path = tmp_path / "rows"
    path.write_text("# all of it\n\n1 1:2 # the first\n\n-1 qid:3 2:1\n# end\n\n+1 3:0.5\n\n")
    for ranks in (1, 2):
        parts = read(path, ranks)
        assert np.concatenate([part.labels for part in parts]).tolist() == [1, -1, 1]
        assert np.concatenate([part.matrix.columns for part in parts]).tolist() == [0, 1, 2]
    assert read(path, 1, features=10)[0].features == 10


def refused(path, ranks, message, features=None):
    def body(comm):
        with pytest.raises(ValueError, match=message) as error:
            read_rows(path, Topology(comm), features)
        assert "\n" not in str(error.value)

    simulated.run(body, ranks)


GOOD = "".join(f"{1 - 2 * (at % 2)} {at + 1}:1 {at + 5}:0.5\n" for at in range(9))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 3:4 5", r"expected index:value, got '5'$"),
        ("1 3:x", r"value: expected a finite number, got '3:x'$"),
        ("spam 3:1", r"label: expected {-1, \+1} or {0, 1}, got 'spam'$"),
        ("2 3:1", r"label: expected {-1, \+1} or {0, 1}, got 2$"),
        ("1 0:1", r"index: expected 1 … 50, got 0$"),
        ("1 4:1 3:1", r"index: expected ascending ones, got 3 after 4$"),
        ("1 51:1", r"index: expected 1 … 50, got 51$"),
        (f"1 {2**63 - 1}:1", rf"index: expected 1 … 50, got {2**63 - 1}$"),
        ("1 3:inf", r"value: expected a finite number, got '3:inf'$"),
    ],
    ids=str,
)
def test_a_wrong_line_is_named(tmp_path, line, message, world_size):
    path = tmp_path / "rows"
    path.write_text(f"{GOOD}{line}\n{GOOD}")
    refused(path, world_size, f"^{path}:10: {message}", 50)


@pytest.mark.parametrize(
    ("content", "line"),
    [("1 1:1\n-1 1:1\n1 1:1\n0 1:1\n", 4), ("# signs\n1 1:1\n\n-1 1:1 # and\n# zeros\n0 1:1\n", 6)],
)
def test_labels_of_both_kinds_do_not_go_together(tmp_path, content, line):
    (tmp_path / "rows").write_text(content)
    with pytest.raises(ValueError, match=rf"rows:{line}: label: expected {{-1, \+1}} or {{0, 1}}, got 0$"):
        read(tmp_path / "rows", 1)


@pytest.mark.parametrize("features", [None, 2**40])
def test_an_index_beyond_those_that_are_read_is_refused(tmp_path, features):
    path = tmp_path / "rows"
    path.write_text(f"1 1:1\n1 {2**63 - 1}:1\n")
    refused(path, 1, rf"rows:2: index: expected 1 … {2**31 - 1}, got {2**63 - 1}$", features)


def test_a_file_that_ends_in_the_middle_of_a_line_is_refused(tmp_path):
    path = tmp_path / "rows"
    path.write_text(f"{GOOD}1 3:0.")
    for ranks in (1, 2):
        refused(path, ranks, r"rows:10: the file ends in the middle of a line$")


def test_files_that_cannot_be_read_are_refused(tmp_path):
    hint = r"\(cloudtrain data makes spam and genres\)"
    refused(tmp_path / "none", 2, f"none: No such file or directory {hint}$")
    refused(tmp_path, 1, "Is a directory$")
    refused(tmp_path / "url.bz2", 1, "url.bz2: expected a file that is not compressed")
    (tmp_path / "comments").write_text("# nothing\n# else\n")
    refused(tmp_path / "comments", 1, "comments:1: expected rows in each rank's part, got comments only$")


def test_a_rank_whose_part_has_no_line_is_refused(tmp_path):
    path = tmp_path / "rows"
    path.write_text("1 1:1\n-1 1:1 2:0.123456789012345678901234567890\n1 1:1\n")
    refused(path, 4, "rows: expected a line or more for each of 4 ranks, got none of bytes")
    path.write_text("")
    refused(path, 1, "rows: expected a line or more for each of 1 ranks, got none of bytes 0 to 0 of 0$")
