"""Data sets of text: their files as they come, their vocabulary, and one line on what is wrong."""

import numpy as np
import pytest

from datacache import unpack_tokens
from tests.training.test_vocabulary import WORDS, sentences
from training.datasets import LabelledTextDataset, ParallelTextDataset, TextDataset, make_dataset, vocabulary

WORD_VOCABULARY = {"size": 4 + len(WORDS), "type": "word"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def put(tmp_path):
    """Return a function that writes files, and returns their folder."""

    def write(**files: list[str]) -> str:
        for name, lines in files.items():
            (tmp_path / name.replace("_", ".")).write_text("".join(f"{line}\n" for line in lines))
        return str(tmp_path)

    return write


def texts_of(dataset, part: str, *, pair: bool = False):
    source, manifest = getattr(dataset, part), dataset.manifest(part)
    samples = source.read(manifest, np.arange(len(manifest)))
    texts = [tuple(map(dataset.vocabulary.decode, unpack_tokens(sample, pair=pair))) for sample in samples]
    return texts if pair else [text for (text,) in texts]


@pytest.mark.parametrize(
    "names",
    [("train.txt", "test.txt"), ("ptb.train.txt", "ptb.test.txt"), ("wiki.train.tokens", "wiki.test.tokens")],
)
def test_running_text_is_found_as_it_is_distributed(put, names):
    train, test = sentences(60), sentences(9, seed=1)
    path = put(**dict(zip(names, ([" = a =", "", *train], [*test, " "]), strict=True)))
    dataset = make_dataset("text", path, vocabulary={**WORD_VOCABULARY, "size": 5 + len(WORDS)})
    assert isinstance(dataset, TextDataset)
    assert texts_of(dataset, "training") == ["= a =", *train]
    assert texts_of(dataset, "test") == test
    assert dataset.vocabulary_size == 5 + len(WORDS)


def test_named_files_are_read_in_their_order(put):
    one, two = sentences(40), sentences(40, seed=1)
    path = put(a=one, b=two, test_txt=one[:3])
    dataset = make_dataset("text", path, train=["b", "a"], test="test.txt", vocabulary=WORD_VOCABULARY)
    assert texts_of(dataset, "training") == [*two, *one]
    assert texts_of(dataset, "test") == one[:3]


def test_a_vocabulary_knows_the_training_part_only(put):
    path = put(train_txt=["a b c"] * 9, test_txt=["a d"])
    dataset = make_dataset("text", path, vocabulary={"size": 7, "type": "word"})
    sample = dataset.test.read(dataset.manifest("test"), np.array([0]))[0]
    tokens = unpack_tokens(sample)[0].tolist()
    assert tokens[1:] == [vocabulary.UNKNOWN, vocabulary.END]


def test_translations_share_a_vocabulary(put):
    train, test = sentences(60), sentences(9, seed=1)
    swapped = [line.swapcase() for line in train]
    path = put(train_en=train, train_de=swapped, dev_en=test, dev_de=[line.swapcase() for line in test])
    settings = {"size": 4 + 2 * len(WORDS), "type": "word"}
    dataset = make_dataset("parallel_text", path, test="dev", vocabulary=settings)
    assert isinstance(dataset, ParallelTextDataset)
    assert texts_of(dataset, "training", pair=True) == list(zip(train, swapped, strict=True))
    other = make_dataset("parallel_text", path, test="dev", vocabulary=settings, source="de", target="en")
    assert texts_of(other, "training", pair=True) == list(zip(swapped, train, strict=True))


@pytest.mark.parametrize("atis", [False, True])
def test_labels_of_both_parts_are_classes(put, atis):
    def line(label: str, text: str) -> str:
        return f"BOS {text} EOS\tO O O {label}" if atis else f"{label}\t{text}"

    train = [line("go" if number % 2 else "stop", text) for number, text in enumerate(sentences(60))]
    test = [line("go", "the cat"), line("never_trained", "a dog")]
    names = ("atis-2.train.w-intent.iob", "atis.test.w-intent.iob") if atis else ("train.tsv", "test.tsv")
    path = put(**{name: lines for name, lines in zip(names, (train, test), strict=True)})
    dataset = make_dataset("labelled_text", path, vocabulary=WORD_VOCABULARY)
    assert isinstance(dataset, LabelledTextDataset)
    assert (dataset.classes, dataset.class_names) == (3, ("go", "never_trained", "stop"))
    assert dataset.manifest("training").labels.tolist() == [2, 0] * 30
    assert dataset.manifest("test").labels.tolist() == [0, 1]
    assert texts_of(dataset, "test") == ["the cat", "a dog"]


def test_manifests_that_are_stored_are_those_of_the_vocabulary(put, tmp_path):
    path, folder = put(train_txt=sentences(60), test_txt=sentences(9)), tmp_path / "manifests"
    words, pieces = (
        make_dataset("text", path, vocabulary=settings).manifest("training", folder)
        for settings in (WORD_VOCABULARY, {"size": 30, "type": "bpe"})
    )
    assert words.samples_fingerprint() != pieces.samples_fingerprint()
    again = make_dataset("text", path, vocabulary=WORD_VOCABULARY).manifest("training", folder)
    assert again.fingerprint == words.fingerprint


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("text", {"train": "x.txt"}, "x.txt: no such file"),
        ("text", {}, "expected the files train.txt and test.txt, or ptb.train.txt and "),
        ("parallel_text", {"target": "fr"}, "test.fr: no such file"),
        ("parallel_text", {"target": "nl"}, "got 2 in train.en and 1 in train.nl: line 2 of train.en has no"),
        ("labelled_text", {"train": "train.en", "test": "test.en"}, "train.en: line 1: expected label<TAB>"),
        ("text", {"train": "train.en", "test": "test.en"}, r"vocabulary.size: expected at most \d+ for this"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(put, name, options, message):
    path = put(train_en=["a b", "c"], test_en=["a"], train_fr=["a", "b"], train_nl=["a"], test_nl=["a"])
    with pytest.raises(ValueError, match=f"^dataset {name}: .*{message}") as caught:
        make_dataset(name, path, **options)
    assert "\n" not in str(caught.value)


# generated text


def test_generated_text_follows_its_rule(put):
    dataset = make_dataset("synthetic_text", tokens=25, samples=200, words=8)
    lines = [list(map(int, text.split())) for text in texts_of(dataset, "training")]
    assert {len(line) for line in lines} == {4, 5, 6, 7, 8}
    pairs = [(before, after) for line in lines for before, after in zip(line, line[1:], strict=False)]
    assert {(after - 3 * before) % 20 for before, after in pairs} == {1, 2}
    assert texts_of(dataset, "training") != texts_of(dataset, "test")
    tokens = [
        unpack_tokens(each)[0] for each in dataset.training.read(dataset.manifest("training"), np.arange(9))
    ]
    assert all(line[:-1].min() >= 5 and line.max() < 25 and line[-1] == vocabulary.END for line in tokens)


def test_generated_translations_and_labels_follow_their_rule():
    pairs = make_dataset("synthetic_text", kind="pairs", tokens=25, samples=50)
    for source, target in texts_of(pairs, "training", pair=True):
        assert [19 - int(word) for word in source.split()] == [int(word) for word in target.split()]
    labelled = make_dataset("synthetic_text", kind="labelled", tokens=25, samples=50, classes=3)
    firsts = [int(text.split()[0]) % 3 for text in texts_of(labelled, "training")]
    assert labelled.manifest("training").labels.tolist() == firsts and labelled.classes == 3
