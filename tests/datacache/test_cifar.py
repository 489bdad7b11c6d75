"""CIFAR-10's records come out as pictures and labels, wherever they lie, and what is no CIFAR-10 is named."""

import uuid

import fsspec
import numpy as np
import pytest

from datacache import CIFAR10, Manifest
from datacache.errors import BadSample, SourceChanged
from datacache.sources import cifar

COUNTS = (3, 1, 4, 2, 5)  # records of each batch; the published ones have 10,000 each
TOTAL = sum(COUNTS)
RECORD = 1 + 3 * 32 * 32


def pictures(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)


def records(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Return records as the authors describe them: the label, then 1,024 reds, greens and blues."""
    return b"".join(
        bytes([label]) + image[:, :, 0].tobytes() + image[:, :, 1].tobytes() + image[:, :, 2].tobytes()
        for image, label in zip(images, labels.tolist(), strict=True)
    )


IMAGES, LABELS = pictures(TOTAL, 1), np.arange(TOTAL) * 7 % 10
TEST_IMAGES, TEST_LABELS = pictures(6, 2), np.arange(6)[::-1].copy()


def files() -> dict[str, bytes]:
    ends = np.cumsum(COUNTS)[:-1]
    parts = zip(np.split(IMAGES, ends), np.split(LABELS, ends), strict=True)
    batches = {f"data_batch_{number}.bin": records(*part) for number, part in enumerate(parts, 1)}
    return batches | {
        "test_batch.bin": records(TEST_IMAGES, TEST_LABELS),
        "batches.meta.txt": b"airplane\n",
        "readme.html": b"-",
    }


def put(url: str, contents: dict[str, bytes]) -> str:
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.makedirs(root, exist_ok=True)
    for name, data in contents.items():
        filesystem.pipe_file(f"{root}/{name}", data)
    return url


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    place = f"file://{tmp_path}/cifar" if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    return put(place, files())


@pytest.mark.parametrize("block_records", [1, 2, 2048])
def test_pictures_and_labels_are_those_of_the_batches_in_order(url, block_records, monkeypatch):
    monkeypatch.setattr(cifar, "BLOCK_RECORDS", block_records)
    source = CIFAR10(url)
    told = []
    manifest = source.scan(lambda done, total: told.append((done, total)))
    assert max(told) == (TOTAL * RECORD, TOTAL * RECORD)
    assert manifest.labels.tolist() == LABELS.tolist()
    assert manifest.shape == (32, 32, 3)
    assert manifest.classes[:2] == ("airplane", "automobile")
    assert len(set(manifest.classes)) == 10
    assert manifest.file.tolist() == np.repeat(range(5), COUNTS).tolist()
    assert source.read(manifest, np.arange(TOTAL)) == [image.tobytes() for image in IMAGES]
    ids = np.array([14, 0, 3, 3, 8])
    assert source.read(manifest, ids) == [IMAGES[sample].tobytes() for sample in ids]
    assert source.read(manifest, np.array([], np.int64)) == []
    source.check(manifest)
    assert source.scan().fingerprint == manifest.fingerprint


def test_the_test_part_is_its_own_file(url):
    source = CIFAR10(url, part="test")
    manifest = source.scan()
    assert list(manifest.files) == ["test_batch.bin"]
    assert manifest.labels.tolist() == TEST_LABELS.tolist()
    assert source.read(manifest, np.arange(6)) == [image.tobytes() for image in TEST_IMAGES]


@pytest.mark.parametrize("size", [0, 1, RECORD - 1, RECORD + 1, 4 * RECORD - 5])
def test_a_file_that_is_no_row_of_records_is_named_with_its_size(url, size):
    put(url, {"data_batch_3.bin": bytes(size)})
    with pytest.raises(
        ValueError, match=f"data_batch_3.bin: expected records of 3073 bytes, got {size} bytes"
    ):
        CIFAR10(url).scan()


@pytest.mark.parametrize("block_records", [1, 2048])
@pytest.mark.parametrize(("record", "label"), [(0, 10), (3, 255)])
def test_a_label_beyond_the_classes_is_named_with_its_record(url, record, label, block_records, monkeypatch):
    monkeypatch.setattr(cifar, "BLOCK_RECORDS", block_records)
    data = bytearray(files()["data_batch_3.bin"])
    data[record * RECORD] = label
    put(url, {"data_batch_3.bin": bytes(data)})
    with pytest.raises(
        BadSample, match=rf"data_batch_3.bin: record {record}: label: expected 0 … 9, got {label}: damaged"
    ):
        CIFAR10(url).scan()


def test_files_that_are_missing_are_named(url):
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.rm(f"{root}/data_batch_4.bin")
    with pytest.raises(FileNotFoundError, match="data_batch_4.bin: no such file, expected those of CIFAR-10"):
        CIFAR10(url).scan()
    with pytest.raises(FileNotFoundError, match="/nowhere/test_batch.bin: no such file"):
        CIFAR10(f"{url}/nowhere", part="test").scan()
    with pytest.raises(ValueError, match="part: expected one of train, test, got 'validation'"):
        CIFAR10(url, part="validation")


def test_a_batch_that_changed_or_shrank_is_noticed(url, tmp_path):
    source = CIFAR10(url)
    source.scan().save(tmp_path / "manifest")
    manifest = Manifest.load(tmp_path / "manifest")
    put(url, {"data_batch_5.bin": files()["data_batch_5.bin"][:RECORD]})
    with pytest.raises(SourceChanged, match="one file came, went or changed .*, such as data_batch_5.bin"):
        source.check(manifest)
    with pytest.raises(SourceChanged, match="data_batch_5.bin: has 3073 bytes, at least .* expected"):
        source.read(manifest, np.array([TOTAL - 1]))
    assert source.read(manifest, np.array([0])) == [IMAGES[0].tobytes()]
