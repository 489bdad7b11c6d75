"""Vocabularies are a function of text and settings, made once, and say in one line what cannot be."""

import stat
import sys
import warnings
from unittest.mock import Mock

import numpy as np
import pytest

from datacache import ParallelText, TextLines
from tests.launching import run
from training.datasets import vocabulary
from training.datasets.vocabulary import Vocabulary, VocabularySettings, vocabulary_of

WORDS = ["the", "cat", "dog", "sat", "stood", "on", "under", "a", "mat", "table", "house", "zwölf"]
TYPES = ["unigram", "bpe", "word"]


def sentences(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, generator.integers(3, 9))) for _ in range(count)]


def made(type: str = "bpe", size: int = 32, seed: int = 0, **options) -> Vocabulary:
    size = min(size, 16) if type == "word" else size
    return Vocabulary.train(sentences(200, seed), VocabularySettings(size, type, **options))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cloudtrain" / "vocabularies"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "train.txt").write_text("\n".join(sentences(200)))
    return TextLines(str(tmp_path), "train.txt")


@pytest.mark.parametrize("type", TYPES)
def test_text_comes_back_from_its_tokens(type):
    found = made(type)
    texts = sentences(50, seed=1)
    tokens = found.encode(texts)
    assert all(line[-1] == vocabulary.END and min(line[:-1]) > vocabulary.END for line in tokens)
    assert max(map(max, tokens)) < found.size
    assert [found.decode(line) for line in tokens] == texts
    padded = np.array([vocabulary.START, *tokens[0], vocabulary.PAD, vocabulary.PAD], np.int32)
    assert found.decode(padded) == texts[0]


@pytest.mark.parametrize("type", TYPES)
def test_special_tokens_have_their_numbers(type):
    plain, masked = made(type), made(type, size=17, mask=True) if type == "word" else made(type, mask=True)
    assert (plain.has_mask, masked.has_mask) == (False, True)
    assert masked.encode(["the ф"])[0][-2:] == [vocabulary.UNKNOWN, vocabulary.END]
    assert vocabulary.MASK not in masked.encode(["the <mask> cat"])[0]  # text cannot ask for it


def test_a_word_vocabulary_has_the_most_frequent_words():
    texts = ["a a a a b b b c c d"]
    found = Vocabulary.train(texts, VocabularySettings(size=6, type="word"))
    assert found.encode(["a b c d"]) == [[4, 5, 1, 1, 3]]


def fingerprints(seed: int = 0) -> list[str]:
    return [made(type, seed=seed).fingerprint for type in TYPES]


def test_the_same_text_gives_the_same_vocabulary_in_another_process():
    program = "from tests.training.test_vocabulary import fingerprints\nprint(*fingerprints())"
    assert run(sys.executable, "-c", program).stdout.split() == fingerprints()
    assert not set(fingerprints(seed=3)) & set(fingerprints())


def test_a_vocabulary_is_made_once_and_kept(text, cache, tmp_path, monkeypatch):
    settings = VocabularySettings(30, "bpe")
    first = vocabulary_of(text, settings)
    (path,) = cache.glob("*.vocabulary")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(Vocabulary, "train", None)
        assert vocabulary_of(text, settings).fingerprint == first.fingerprint
    assert vocabulary_of(text, VocabularySettings(31, "bpe")).size == 31
    (tmp_path / "train.txt").write_text("\n".join(sentences(200, seed=5)))  # other text at the same place
    assert vocabulary_of(text, settings).fingerprint != first.fingerprint
    assert len(list(cache.glob("*.vocabulary"))) == 3


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_vocabulary_that_cannot_be_kept_is_made_once(text, cache, monkeypatch, has_folder):
    trained, train = [], Vocabulary.train
    if has_folder:
        full = Mock(side_effect=OSError(28, "No space left on device"))
        monkeypatch.setattr(vocabulary, "write_atomic", full)
    else:
        cache.parent.mkdir(parents=True)
        cache.write_text("in the way")
    monkeypatch.setattr(Vocabulary, "train", lambda *given: trained.append(given) or train(*given))
    assert vocabulary_of(text, VocabularySettings(30, "bpe")).size == 30
    assert len(trained) == 1


def test_both_sides_of_parallel_text_are_in_a_vocabulary_and_of_much_text_a_part(tmp_path, monkeypatch):
    (tmp_path / "x").write_text("\n".join(["aa"] * 50 + ["cc"] * 50))
    (tmp_path / "y").write_text("\n".join(["bb"] * 50 + ["dd"] * 50))
    source = ParallelText(str(tmp_path), source="x", target="y")
    monkeypatch.setattr(vocabulary, "MOST_LINES", 10)
    monkeypatch.setattr(vocabulary, "READ_LINES", 3)
    assert list(vocabulary._lines(source)) == ["aa", "bb"] * 5 + ["cc", "dd"] * 5
    found = vocabulary_of(source, VocabularySettings(8, "word"))
    assert sorted(found.encode(["aa bb cc dd"])[0]) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 6000}, r"vocabulary.size: expected at most \d+ for this text, got 6000"),
        ({"size": 17, "type": "word"}, "vocabulary.size: expected at most 16 for this text, got 17"),
        ({"size": 9}, r"vocabulary.size: expected at least \d+, one for each character .*, got 9"),
        ({"size": 5}, "vocabulary.size: expected a whole number from 6, got 5"),
        ({"type": "words"}, 'unknown vocabulary.type "words" .*did you mean "word"?'),
        ({"sise": 4}, 'sise: vocabulary has no such option .*did you mean "size"?'),
    ],
)
def test_what_cannot_be_is_said_in_one_line(text, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        vocabulary_of(text, VocabularySettings.of(settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda old: b"", lambda old: old[:-1], lambda old: old[:99] + b"x" + old[100:]]
)
def test_a_damaged_vocabulary_is_made_again_once(text, cache, damage):
    settings = VocabularySettings(30, "bpe")
    first = vocabulary_of(text, settings)
    (path,) = cache.glob("*.vocabulary")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="vocabulary: damaged, the vocabulary is made again"):
        assert vocabulary_of(text, settings).fingerprint == first.fingerprint
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert vocabulary_of(text, settings).fingerprint == first.fingerprint
