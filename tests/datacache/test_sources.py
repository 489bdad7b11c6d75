"""Every source gives the payloads that were put there, wherever it finds them, and says what is wrong."""

import functools
import http.server
import io
import struct
import tempfile
import threading
import uuid

import fsspec
import lmdb
import numpy as np
import pytest

from datacache.errors import BadSample, SourceChanged
from datacache.manifest import Manifest
from datacache.sources import (
    CIFAR10,
    LMDB,
    Arrays,
    ImageFolder,
    LabelledText,
    ParallelText,
    StoredArrays,
    TextLines,
    TFRecord,
    Tokenized,
    text,
    tfrecord,
    unpack_tokens,
)
from datacache.sources.tfrecord import masked_crc32c


def bytes_of(number: int, size: int) -> bytes:
    return np.random.default_rng(number).bytes(size)


def put(url: str, contents: dict[str, bytes]) -> str:
    filesystem, root = fsspec.core.url_to_fs(url)
    for path, data in contents.items():
        filesystem.makedirs(f"{root}/{path}".rpartition("/")[0], exist_ok=True)
        filesystem.pipe_file(f"{root}/{path}", data)
    return url


@pytest.fixture
def memory():
    return f"memory://{uuid.uuid4().hex}"


def all_ids(manifest: Manifest) -> np.ndarray:
    return np.arange(len(manifest))


def assert_gives(source, payloads: list[bytes], labels: list[int]) -> Manifest:
    """Scan, and read all in order, some in another order and twice, one, none."""
    told = []
    manifest = source.scan(lambda done, total: told.append((done, total)))
    done, total = max(told)  # several threads tell
    assert done == total > 0
    assert manifest.labels.tolist() == labels
    assert manifest.sizes.tolist() == [len(payload) for payload in payloads]
    assert manifest.payload == source.payload
    assert source.read(manifest, all_ids(manifest)) == payloads
    ids = np.random.default_rng(3).integers(0, len(payloads), 2 * len(payloads))
    assert source.read(manifest, ids) == [payloads[sample] for sample in ids]
    assert source.read(manifest, np.array([len(payloads) - 1])) == payloads[-1:]
    assert source.read(manifest, np.array([], np.int64)) == []
    for wrong in (len(payloads), -1):  # NumPy would take -1 from the end
        with pytest.raises(ValueError, match=rf"ids: expected 0 … {len(payloads) - 1}, got"):
            source.read(manifest, np.array([0, wrong]))
    assert source.scan().fingerprint == manifest.fingerprint
    with tempfile.TemporaryDirectory() as folder:
        manifest.save(f"{folder}/manifest")
        stored = Manifest.load(f"{folder}/manifest")
    source.check(stored)
    assert source.read(stored, all_ids(stored)) == payloads
    return stored


# images in folders

PHOTOS = {
    "cat/1.jpg": bytes_of(1, 100),
    "cat/deeper/2.JPEG": bytes_of(2, 3000),
    "cat-fish/3.png": bytes_of(3, 1),
    "dog/4.jpg": b"",
    "ähre/5.webp": bytes_of(5, 70_000),
}
NO_PHOTOS = {"cat/notes.txt": b"-", "dog/._4.jpg": b"-", ".trash/9.jpg": b"-", "README": b"-"}


def test_images_of_folders_are_in_order_of_their_paths_and_labelled_by_folder(url):
    source = ImageFolder(put(url, PHOTOS | NO_PHOTOS))
    paths = sorted(PHOTOS)
    labels = {"cat": 0, "cat-fish": 1, "dog": 2, "ähre": 3}
    payloads = [PHOTOS[path] for path in paths]
    manifest = assert_gives(source, payloads, [labels[path.partition("/")[0]] for path in paths])
    assert list(manifest.files) == paths
    assert manifest.classes == tuple(labels)
    assert manifest.shape is None


def test_images_over_http_from_a_server_that_knows_no_ranges(tmp_path):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    photos = {path: data for path, data in PHOTOS.items() if "ä" not in path}
    put(f"file://{tmp_path}", photos | NO_PHOTOS)
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = ImageFolder(f"http://127.0.0.1:{server.server_port}")
        manifest = assert_gives(source, [photos[path] for path in sorted(photos)], [1, 0, 0, 2])
        server.shutdown()
    assert list(manifest.files) == sorted(photos)


def test_labels_of_a_part_follow_the_classes_of_the_whole(memory):
    put(memory, {"b/1.jpg": b"1", "d/2.jpg": b"2"})
    manifest = ImageFolder(memory, classes=["d", "c", "b"]).scan()
    assert manifest.labels.tolist() == [2, 0]
    assert manifest.classes == ("d", "c", "b")
    with pytest.raises(ValueError, match="1 of 2 folders are none of the 3 classes given, such as d"):
        ImageFolder(memory, classes=["a", "b", "c"]).scan()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"a/1.txt": b"-"}, r"expected images \(.jpg, .*\) in folders, found none"),
        ({"a/1.jpg": b"-", "2.jpg": b"-"}, "expected samples in folders named like classes, got 2.jpg"),
    ],
)
def test_folders_without_images_or_images_without_folders_are_refused(memory, contents, message):
    with pytest.raises(ValueError, match=message):
        ImageFolder(put(memory, contents)).scan()


@pytest.mark.parametrize("data", [b"", b"12", b"123456"])
def test_an_image_of_another_size_than_in_the_manifest_has_changed(url, data):
    source = ImageFolder(put(url, {"a/1.jpg": b"1234", "a/2.jpg": b"5678"}))
    manifest = source.scan()
    put(url, {"a/2.jpg": data})
    assert source.read(manifest, np.array([0])) == [b"1234"]
    with pytest.raises(SourceChanged, match=r"a/2.jpg: has \d bytes, 4 expected: it changed"):
        source.read(manifest, np.array([0, 1]))


def test_a_check_names_what_came_went_or_changed(url):
    source = ImageFolder(put(url, {"a/1.jpg": b"1234", "a/2.jpg": b"5678"}))
    manifest = source.scan()
    put(url, {"a/3.jpg": b"1234"})
    with pytest.raises(SourceChanged, match="one file came, went or changed .*, such as a/3.jpg; build"):
        source.check(manifest)
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.rm(f"{root}/a/1.jpg")
    with pytest.raises(SourceChanged, match="2 files came, went or changed .*, such as a/1.jpg; build"):
        source.check(manifest)
    with pytest.raises(SourceChanged, match="no longer there: .*1.jpg"):
        source.read(manifest, np.array([0]))


# TFRecord


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    parts = []
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(key: str, kind: int, items: bytes) -> bytes:
    return field(1, field(1, key.encode()) + field(2, field(kind, items)))


def example(image: bytes, label: int, packed: bool = True) -> bytes:
    integers = field(1, varint(label)) if packed else varint(1 << 3) + varint(label)
    features = [
        feature("image/height", 3, field(1, varint(375))),
        feature("image/encoded", 1, field(1, image)),
        feature("image/object/bbox/xmin", 2, field(1, struct.pack("<2f", 0.25, 0.5))),
        feature("image/class/label", 3, integers),
    ]
    return field(1, b"".join(features))


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    crcs = [struct.pack("<I", masked_crc32c(each)) for each in (length, data)]
    return length + crcs[0] + data + crcs[1]


IMAGES = [bytes_of(number, size) for number, size in enumerate([0, 1, 127, 128, 5000, 20_000, 70, 300])]


def test_checksums_are_those_of_the_standard():
    rfc_3720 = {bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E}  # appendix B.4
    for data, crc in {**rfc_3720, bytes(range(31, -1, -1)): 0x113FDB5C, b"": 0}.items():
        masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
        assert masked_crc32c(data) == masked_crc32c(memoryview(b"-" + data)[1:]) == masked


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("block_bytes", [1, 100, 8 << 20])
def test_images_and_labels_of_tfrecords_whatever_the_blocks(url, packed, block_bytes, monkeypatch):
    monkeypatch.setattr(tfrecord, "BLOCK_BYTES", block_bytes)
    records = [record(example(image, 3 + label, packed)) for label, image in enumerate(IMAGES)]
    put(url, {"train-0": b"".join(records[:5]), "train-1": b"", "train-2": b"".join(records[5:])})
    put(url, {"validation-0": records[0]})
    source = TFRecord(url, pattern="train-*", label_offset=1)
    manifest = assert_gives(source, IMAGES, list(range(2, 10)))
    assert manifest.file.tolist() == [0] * 5 + [2] * 3


def test_what_tensorflow_writes_is_read(tmp_path):
    tf = pytest.importorskip("tensorflow")
    generator = np.random.default_rng(4)
    labels = [1, 1000, 0, 2**40, 7]
    images = [generator.bytes(int(size)) for size in generator.integers(0, 200_000, len(labels))]
    with tf.io.TFRecordWriter(str(tmp_path / "train-00000-of-00001")) as writer:
        for image, label in zip(images, labels, strict=True):
            features = {
                "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                "image/class/text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a", b"b"])),
                "image/object/bbox/xmin": tf.train.Feature(float_list=tf.train.FloatList(value=[0.5, 2])),
                "image/height": tf.train.Feature(int64_list=tf.train.Int64List(value=[-1, 3])),
                "empty": tf.train.Feature(),
            }
            message = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(message.SerializeToString())
    assert_gives(TFRecord(str(tmp_path)), images, labels)


def test_other_keys_can_be_named(memory):
    data = field(1, feature("jpg", 1, field(1, b"image")) + feature("cls", 3, field(1, varint(4))))
    put(memory, {"x": record(data)})
    source = TFRecord(memory, image_key="jpg", label_key="cls")
    assert_gives(source, [b"image"], [4])


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


GOOD = record(example(b"abc", 1))


def of(images: bytes, labels: bytes) -> bytes:
    """Return an example of these lists."""
    return field(1, feature("image/encoded", 1, images) + feature("image/class/label", 3, labels))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (flipped(GOOD, 3), "no TFRecord, or damaged: the length's checksum is another"),
        (flipped(GOOD, 20), "damaged: the data's checksum is another"),
        (GOOD[:-1], r"cut off: it would end at byte \d+ of \d+"),
        (b"\x1f\x8b" + bytes(40), "the length's checksum is another; it is gzip: unpack it"),
        (record(b""), "1 at byte .*: has no feature 'image/encoded'"),
        (record(example(b"", -1)), r"label: expected at least 0 \(label_offset\), got -1"),
        (record(field(1, feature("image/encoded", 1, field(1, b"x")))), "has no feature 'image/class/label'"),
        (record(example(b"", 1).replace(b"\x1a\x03\x0a\x01\x01", b"\x1a\x03\x0a\x01\x81")), "without an end"),
        (record(b"\x0a\x05\x0a\x80\x80\x80\x01"), "a field is longer than what holds it"),
        (record(b"\x0b"), "no tf.train.Example: wire type 3"),
        (record(of(field(1, b"x") * 2, field(1, b"\x01"))), "image: expected a list of one .*, got 2"),
        (record(of(field(1, b"x"), field(1, b"\x01\x02"))), "label: expected a list of one integer, got 2"),
    ],
)
def test_records_that_are_damaged_or_no_images_are_named(memory, data, message):
    put(memory, {"shard": GOOD + data})
    with pytest.raises(BadSample, match=f"shard: record.*{message}") as caught:
        TFRecord(memory).scan()
    assert f"at byte {len(GOOD)}" in str(caught.value)


def test_noise_with_right_checksums_is_refused_and_nothing_worse(memory):
    generator = np.random.default_rng(6)
    whole = example(bytes_of(1, 50), 300)
    for number in range(300):
        data = bytearray(whole)
        for _ in range(1 + number % 4):
            data[generator.integers(len(data))] = generator.integers(256)
        put(memory, {"shard": record(bytes(data[: generator.integers(len(data) // 2, len(data) + 1)]))})
        source = TFRecord(memory)
        try:
            manifest = source.scan()
        except BadSample:
            continue
        start, size = int(manifest.start[0]), int(manifest.sizes[0])
        assert 12 <= start <= start + size <= len(data) + 12
        assert len(source.read(manifest, np.array([0]))[0]) == size


def test_folders_without_records_are_refused(memory):
    put(memory, {"empty": b""})
    with pytest.raises(ValueError, match=r"expected TFRecord files that match 'a\*', found no record"):
        TFRecord(memory, pattern="a*").scan()


# LMDB


def write_lmdb(path, values: dict[bytes, bytes], **options) -> None:
    with (
        lmdb.open(str(path), map_size=1 << 24, **options) as environment,
        environment.begin(write=True) as txn,
    ):
        for key, value in values.items():
            txn.put(key, value)


KEYS = [b"a/0", b"a/1\xff", b"b/0", b"c/0"]


@pytest.mark.parametrize("subdir", [True, False])
def test_images_of_an_lmdb_with_labels_before_them(tmp_path, subdir):
    values = {key: struct.pack(">q", 9 - at) + IMAGES[at] for at, key in enumerate(KEYS)}
    write_lmdb(tmp_path / "db", values | {b"__len__": b"4"}, subdir=subdir)
    assert_gives(LMDB(f"file://{tmp_path}/db"), IMAGES[:4], [9, 8, 7, 6])


def test_images_of_an_lmdb_with_classes_in_the_keys(tmp_path):
    write_lmdb(tmp_path / "db", {key: IMAGES[at] for at, key in enumerate(KEYS)})
    manifest = assert_gives(LMDB(str(tmp_path / "db"), labels="key"), IMAGES[:4], [0, 0, 1, 2])
    assert manifest.classes == ("a", "b", "c")


def test_two_sources_of_one_lmdb_in_one_process(tmp_path):
    write_lmdb(tmp_path / "db", {b"a/0": b"image"})
    sources = [LMDB(str(tmp_path / "db"), labels="key") for _ in range(2)]
    assert sources[0].scan().fingerprint == sources[1].scan().fingerprint


def test_an_lmdb_that_was_written_to_has_changed(tmp_path):
    write_lmdb(tmp_path / "db", {b"a/0": b"image", b"b/0": b"other"})
    manifest = LMDB(str(tmp_path / "db"), labels="key").scan()
    write_lmdb(tmp_path / "db", {b"b/0": b"longer than it was"})
    source = LMDB(str(tmp_path / "db"), labels="key")
    with pytest.raises(SourceChanged, match="was written to after the manifest was made"):
        source.check(manifest)
    with pytest.raises(SourceChanged, match="one file came, went or changed .*, such as b/0"):
        source.read(manifest, np.array([1]))


def test_what_is_no_lmdb_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected an LMDB, found nothing"):
        LMDB(str(tmp_path / "db")).scan()
    (tmp_path / "db").write_bytes(bytes(10_000))
    with pytest.raises(ValueError, match="expected an LMDB: "):
        LMDB(str(tmp_path / "db")).scan()
    with pytest.raises(ValueError, match="can only be read from a local path"):
        LMDB("s3://bucket/db")
    with pytest.raises(ValueError, match="labels: expected 'value' or 'key', got 'keys'"):
        LMDB(str(tmp_path / "db"), labels="keys")
    write_lmdb(tmp_path / "images", {b"key": b"\xff\xd8\xff\xe0 JPEG"})
    with pytest.raises(ValueError, match="expected a label in the value's first 8 bytes.*labels: key"):
        LMDB(str(tmp_path / "images")).scan()


# arrays


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(8).integers(0, 256, shape).astype(np.uint8)


def saved(array: np.ndarray, save=np.save) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(("shape", "one"), [((7, 4, 5), (4, 5, 1)), ((3, 2, 6, 3), (2, 6, 3))])
@pytest.mark.parametrize("kind", [np.uint8, np.int64, ">i4"])
def test_arrays_in_files_and_in_memory_are_the_same_samples(url, shape, one, kind):
    images, labels = pixels(*shape), np.arange(shape[0]).astype(kind)
    put(url, {"images.npy": saved(images), "labels.npy": saved(labels)})
    for source in (StoredArrays(url), Arrays(images, labels)):
        manifest = assert_gives(source, [image.tobytes() for image in images], labels.tolist())
        assert manifest.shape == one


def test_arrays_of_strides_are_read_as_they_look():
    images = pixels(6, 4, 8)[::2, :, ::-1]
    assert_gives(Arrays(images, np.arange(3)), [each.tobytes() for each in images], [0, 1, 2])


def test_arrays_that_changed_in_memory_are_noticed():
    images, labels = pixels(2, 3, 3), np.arange(2)
    source = Arrays(images, labels)
    manifest = source.scan()
    for array, at in ((images, (1, 2, 2)), (labels, 0)):
        array[at] ^= 1
        with pytest.raises(SourceChanged, match="arrays in memory are others"):
            source.check(manifest)
        array[at] ^= 1
        source.check(manifest)
    images[0, 0, 0] ^= 1
    assert source.scan().fingerprint != manifest.fingerprint


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 8)), np.zeros(2, int), r"images.*: expected uint8 .*, got float64 \(2, 8\)"),
        (np.zeros((2, 8), np.uint8), np.zeros(2, int), r"images.*: expected uint8 .*, got uint8 \(2, 8\)"),
        (pixels(2, 3, 3), np.zeros(3, int), r"labels.*: expected integers \(2,\), got int64 \(3,\)"),
        (pixels(2, 3, 3), np.zeros(2), r"labels.*: expected integers \(2,\), got float64 \(2,\)"),
    ],
)
def test_arrays_that_are_no_images_are_refused(memory, images, labels, message):
    put(memory, {"images.npy": saved(images), "labels.npy": saved(labels)})
    with pytest.raises(ValueError, match=message):
        StoredArrays(memory).scan()
    with pytest.raises(ValueError, match=message):
        Arrays(images, labels).scan()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a .npy file"),
        (saved(np.arange(3), np.savez), "expected a .npy file"),
        (saved(pixels(3, 4, 5))[:-1], r"expected 188 bytes for shape \(3, 4, 5\), got 187"),
        (saved(np.asfortranarray(pixels(3, 4, 5))), "got Fortran order"),
    ],
)
def test_files_that_are_no_arrays_are_refused(memory, data, message):
    put(memory, {"x.npy": data, "y.npy": saved(np.arange(3))})
    with pytest.raises(ValueError, match=f"x.npy: .*{message}"):
        StoredArrays(memory, images="x.npy", labels="y.npy").scan()
    put(memory, {"x.npy": saved(pixels(3, 4, 5)), "y.npy": data[:50]})
    with pytest.raises(ValueError, match="y.npy: expected a .npy file"):
        StoredArrays(memory, images="x.npy", labels="y.npy").scan()


# CIFAR-10

BATCHES = (3, 1, 4, 2, 5)  # records of each; the published ones have 10,000 each
CIFAR_RECORD = 1 + 3 * 32 * 32


def cifar_records(images: np.ndarray, labels: list[int]) -> list[bytes]:
    """Return records as the authors describe them: the label, then 1,024 reds, greens and blues."""
    return [
        bytes([label]) + b"".join(image[:, :, colour].tobytes() for colour in range(3))
        for image, label in zip(images, labels, strict=True)
    ]


CIFAR_IMAGES, CIFAR_LABELS = pixels(sum(BATCHES), 32, 32, 3), [number * 7 % 10 for number in range(15)]


@pytest.fixture
def cifar(url):
    """A URL with the files of CIFAR-10; the test part is the second batch backwards."""
    records, ends = cifar_records(CIFAR_IMAGES, CIFAR_LABELS), np.cumsum(BATCHES).tolist()
    files = {
        f"data_batch_{number}.bin": b"".join(records[end - count : end])
        for number, (count, end) in enumerate(zip(BATCHES, ends, strict=True), 1)
    }
    return put(url, files | {"test_batch.bin": b"".join(records[::-1]), "readme.html": b"-"})


@pytest.mark.parametrize("block_records", [1, 2, 2048])
def test_pictures_and_labels_of_cifar_are_those_of_its_batches_in_order(cifar, block_records, monkeypatch):
    monkeypatch.setattr("datacache.sources.arrays.BLOCK_RECORDS", block_records)
    payloads = [image.tobytes() for image in CIFAR_IMAGES]
    manifest = assert_gives(CIFAR10(cifar), payloads, CIFAR_LABELS)
    assert manifest.shape == (32, 32, 3)
    assert manifest.classes[:2] == ("airplane", "automobile")
    assert len(set(manifest.classes)) == 10
    assert manifest.file.tolist() == np.repeat(range(5), BATCHES).tolist()
    manifest = assert_gives(CIFAR10(cifar, part="test"), payloads[::-1], CIFAR_LABELS[::-1])
    assert list(manifest.files) == ["test_batch.bin"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected records of 3073 bytes, got 0 bytes"),
        (bytes(CIFAR_RECORD + 1), "expected records of 3073 bytes, got 3074 bytes"),
        (bytes([10]) + bytes(CIFAR_RECORD - 1), "record 0: label: expected 0 … 9, got 10"),
        (bytes(CIFAR_RECORD) + b"\xff" * CIFAR_RECORD, "record 1: label: expected 0 … 9, got 255"),
    ],
)
def test_files_that_are_none_of_cifar_are_named(cifar, data, message):
    put(cifar, {"data_batch_3.bin": data})
    with pytest.raises((ValueError, BadSample), match=f"data_batch_3.bin: {message}"):
        CIFAR10(cifar).scan()


def test_a_part_of_cifar_that_is_not_there_is_named(cifar):
    with pytest.raises(FileNotFoundError, match="/nowhere/test_batch.bin: no such file"):
        CIFAR10(f"{cifar}/nowhere", part="test").scan()
    with pytest.raises(ValueError, match="part: expected one of train, test, got 'validation'"):
        CIFAR10(cifar, part="validation")


# text

GERMAN = ["Ein Haus", "x", "ein Öl\r", "zwölf Boxkämpfer jagen Viktor", "Ende\x85."]
ENGLISH = ["A house", "empty", " an oil", "the quick brown fox", "The\u2028end."]


@pytest.fixture(params=[1, 7, 8 << 20])
def block_bytes(request, monkeypatch):
    """Text is read in blocks of these many bytes."""
    monkeypatch.setattr(text, "BLOCK_BYTES", request.param)


@pytest.mark.parametrize("last", ["", "\n"])
@pytest.mark.usefixtures("block_bytes")
def test_lines_come_with_their_translations(url, last):
    put(url, {"x.de": "\n".join(GERMAN).encode(), "x.en": ("\n".join(ENGLISH) + last).encode()})
    source = ParallelText(url, source="x.de", target="x.en")
    assert_gives(source, [f"{a}\n{b}".encode() for a, b in zip(GERMAN, ENGLISH, strict=True)], [0] * 5)


@pytest.mark.parametrize(("first", "last"), [("", ""), ("", "\n"), ("\ufeff", "\n\n \n")])
@pytest.mark.usefixtures("block_bytes")
def test_text_comes_line_by_line_and_file_after_file_without_blank_lines(url, first, last):
    put(url, {"a": f"{first}\n = Öl = \n\n \t\r\nzwölf\r\nEnde{last}".encode(), "b": b"", "c": b"x\ny"})
    source = TextLines(url, ["c", "a", "b"])
    expected = ["x", "y", " = Öl = ", "zwölf\r", "Ende"]
    manifest = assert_gives(source, [line.encode() for line in expected], [0] * 5)
    assert manifest.file.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("german", "english", "message"),
    [
        (b"a\nb\n", b"a\n", "got 2 in de and 1 in en: line 2 of de has no translation"),
        (b"a\nb\nc", b"a\n\n \n", "/en: line 2 is empty: expected text in each, 2 of 3 have none"),
        (b"a\nb\n\t", b"a\nb\nc\n", "/de: line 3 is empty: expected text in each, 1 of 3 have none"),
        (b"", b"", "expected at least one sample"),
        (b"a\n\xff", b"a\nb", "/de: byte 2: no UTF-8: invalid start byte"),
        (b"a\xc3", b"a", "/de: byte 1: no UTF-8: unexpected end of data"),
    ],
)
@pytest.mark.usefixtures("block_bytes")
def test_texts_that_do_not_belong_together_are_refused(memory, german, english, message):
    put(memory, {"de": german, "en": english})
    with pytest.raises(ValueError, match=message):
        ParallelText(memory, source="de", target="en").scan()


def test_text_without_lines_is_refused(memory):
    put(memory, {"a": b"\n \n", "b": b"\xff"})
    with pytest.raises(ValueError, match="/a: expected lines of text, found none"):
        TextLines(memory, "a").scan()
    with pytest.raises(BadSample, match="/b: byte 0: no UTF-8"):
        TextLines(memory, ["a", "b"]).scan()


ATIS = (
    "BOS what flights leave boston EOS\tO O O O B-fromloc atis_flight\n"
    "BOS fare and code EOS\tO O O O atis_airfare#atis_flight \n"
)
TABBED = "atis_flight\twhat flights leave boston\natis_airfare#atis_flight\tfare and code"


@pytest.mark.parametrize("content", [ATIS, TABBED, TABBED + "\r\n", "\ufeff" + TABBED])
def test_labelled_texts_come_with_their_labels(url, content):
    put(url, {"x": content.encode()})
    texts = [b"what flights leave boston", b"fare and code" + b"\r" * content.count("\r")]
    manifest = assert_gives(LabelledText(url, "x"), texts, [1, 0])
    assert manifest.classes == ("atis_airfare#atis_flight", "atis_flight")
    wider = LabelledText(url, "x", classes=["atis_flight", "other", "atis_airfare#atis_flight"])
    assert_gives(wider, texts, [0, 2])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\tb\nno label\n", "/x: line 2: expected label<TAB>text, got 'no label'"),
        (b"a\t \n", r"/x: line 1: expected label<TAB>text, got 'a\\t '"),
        (b"w" * 100, f"/x: line 1: expected label<TAB>text, got '{'w' * 60}…'"),
        (b"a\tb\n\na\tc", "/x: line 2 is empty"),
        (b"a\tb\nc\td", "/x: line 2 has label 'c', which is none of the 2 classes"),
        (b"", "expected at least one sample"),
    ],
)
def test_texts_without_labels_are_refused(memory, content, message):
    put(memory, {"x": content})
    with pytest.raises(ValueError, match=message):
        LabelledText(memory, "x", classes=["a", "b"]).scan()


class Codepoints:
    """Encodes text as its characters' numbers, and 0 after them."""

    fingerprint = "codepoints"

    def encode(self, texts):
        """Return the tokens of each text."""
        return [[*map(ord, text), 0] for text in texts]


def test_tokens_of_lines_and_of_pairs_are_counted_and_read(memory, monkeypatch):
    monkeypatch.setattr(text, "SCANNED_SAMPLES", 2)
    put(memory, {"de": "\n".join(GERMAN).encode(), "en": "\n".join(ENGLISH).encode()})
    german, english = (Codepoints().encode(lines) for lines in (GERMAN, ENGLISH))

    lines = Tokenized(TextLines(memory, "de"), Codepoints())
    manifest = assert_gives(lines, [np.array(line, np.int32).tobytes() for line in german], [0] * 5)
    assert manifest.more["tokens"].tolist() == list(map(len, german))

    pairs = Tokenized(ParallelText(memory, source="de", target="en"), Codepoints())
    payloads = [
        np.array([len(one), *one, *other], np.int32).tobytes()
        for one, other in zip(german, english, strict=True)
    ]
    manifest = assert_gives(pairs, payloads, [0] * 5)
    for column, tokens in (("source_tokens", german), ("target_tokens", english)):
        assert manifest.more[column].tolist() == list(map(len, tokens))
    for payload, *pair in zip(payloads, german, english, strict=True):
        assert [each.tolist() for each in unpack_tokens(payload, pair=True)] == pair


def test_tokens_of_another_encoder_or_of_changed_text_are_not_used(tmp_path):
    url = put(str(tmp_path), {"x": b"one\ntwo\n"})
    source = Tokenized(TextLines(url, "x"), Codepoints())
    manifest = source.scan()
    source.check(manifest)
    other = Codepoints()
    other.fingerprint = "other"
    with pytest.raises(ValueError, match="expected tokens of encoder other, got those of codepoints"):
        Tokenized(TextLines(url, "x"), other).read(manifest, np.array([0]))
    assert (
        Tokenized(TextLines(url, "x"), other).scan().samples_fingerprint() != manifest.samples_fingerprint()
    )
    put(str(tmp_path), {"x": b"one\ntwo\nthree\n"})
    with pytest.raises(SourceChanged, match="one file came, went or changed .*, such as x"):
        source.check(manifest)


@pytest.mark.parametrize("payload", [b"", np.array([2, 5], np.int32), np.array([-1, 5], np.int32)])
def test_tokens_that_are_not_of_two_lines_are_refused(payload):
    with pytest.raises(BadSample, match="tokens of two lines"):
        unpack_tokens(bytes(payload), pair=True)
