"""Text: running, parallel and labelled, as tokens of a vocabulary that is trained on the training part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datacache import LabelledText, ParallelText, Storage, StoredSource, TextLines, Tokenized
from datacache.storage import StorageOptions
from training.datasets.dataset import Dataset
from training.datasets.vocabulary import Vocabulary, VocabularySettings, vocabulary_of

Names = str | Sequence[str] | None
# The names of the training and the test file, as each is distributed.
TEXTS = (
    ("train.txt", "test.txt"),
    ("ptb.train.txt", "ptb.test.txt"),
    ("wiki.train.tokens", "wiki.test.tokens"),
    ("wiki.train.raw", "wiki.test.raw"),
)
LABELLED = (("train.tsv", "test.tsv"), ("atis-2.train.w-intent.iob", "atis.test.w-intent.iob"))
HINT = "cloudtrain data makes some"


@dataclass(frozen=True)
class _Tokens(Dataset):
    """Text as tokens of a vocabulary."""

    vocabulary: Vocabulary

    @property
    def vocabulary_size(self) -> int:
        """The number of different tokens, special ones included."""
        return self.vocabulary.size


@dataclass(frozen=True)
class TextDataset(_Tokens):
    """Running text, a sentence or paragraph a line."""


@dataclass(frozen=True)
class ParallelTextDataset(_Tokens):
    """Sentences and their translations. One vocabulary has the tokens of both languages."""


@dataclass(frozen=True)
class LabelledTextDataset(_Tokens):
    """Texts with one label each."""

    class_names: tuple[str, ...]
    """Names of the labels ``0, 1, …``."""

    @property
    def classes(self) -> int:
        """The number of labels."""
        return len(self.class_names)


def text(
    path: str,
    *,
    train: Names = None,
    test: Names = None,
    vocabulary: Mapping[str, Any] | None = None,
    storage: StorageOptions = None,
) -> TextDataset:
    """Return the running text at ``path``, without blank lines.

    ``train``, ``test``: the names of files; by default ``train.txt`` and ``test.txt``, or PTB's or
    WikiText's. ``vocabulary``: see :class:`~training.datasets.vocabulary.VocabularySettings`. ``storage``:
    the keywords of :class:`datacache.storage.Storage`.
    """
    settings = VocabularySettings.of(vocabulary)
    names = _files(path, (train, test), TEXTS, storage)
    training, testing = (TextLines(path, each, storage=storage) for each in names)
    return TextDataset(*_tokenized(training, testing, settings))


def parallel_text(
    path: str,
    *,
    source: str = "en",
    target: str = "de",
    train: str = "train",
    test: str = "test",
    vocabulary: Mapping[str, Any] | None = None,
    storage: StorageOptions = None,
) -> ParallelTextDataset:
    """Return the sentences in the files ``train.en`` and ``test.en`` at ``path``, and their translations.

    ``source``, ``target``: the endings of the files of each language. ``train``, ``test``: what comes before
    the dot. ``vocabulary``, ``storage``: as of :func:`text`.
    """
    settings = VocabularySettings.of(vocabulary)
    for part in (train, test):
        _files(path, (f"{part}.{source}", f"{part}.{target}"), (), storage)
    training, testing = (
        ParallelText(path, source=f"{part}.{source}", target=f"{part}.{target}", storage=storage)
        for part in (train, test)
    )
    return ParallelTextDataset(*_tokenized(training, testing, settings))


def labelled_text(
    path: str,
    *,
    train: str | None = None,
    test: str | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    storage: StorageOptions = None,
) -> LabelledTextDataset:
    """Return the texts with labels at ``path``: lines of ``label<TAB>text``, or in ATIS's format.

    ``train``, ``test``: the names of files; by default ``train.tsv`` and ``test.tsv``, or ATIS's.
    ``vocabulary``, ``storage``: as of :func:`text`. The classes are the labels of both parts: ATIS's test has
    labels that its training part lacks.
    """
    settings = VocabularySettings.of(vocabulary)
    for part, name in (("train", train), ("test", test)):
        if name is not None and not isinstance(name, str):
            raise ValueError(f"{part}: expected the name of a file, got {name!r}")
    names = [name for (name,) in _files(path, (train, test), LABELLED, storage)]
    found = {label for name in names for label in LabelledText(path, name, storage=storage).scan().classes}
    classes = tuple(sorted(found))
    training, testing = (LabelledText(path, name, classes=classes, storage=storage) for name in names)
    return LabelledTextDataset(*_tokenized(training, testing, settings), classes)


def _tokenized(
    training: StoredSource, test: StoredSource, settings: VocabularySettings
) -> tuple[Tokenized, Tokenized, Vocabulary]:
    """Return both parts as tokens of the training part's vocabulary, and this vocabulary."""
    made = vocabulary_of(training, settings)
    return Tokenized(training, made), Tokenized(test, made), made


def _files(
    path: str, given: tuple[Names, Names], known: Sequence[tuple[str, str]], storage: StorageOptions
) -> list[list[str]]:
    """Return the names of the files of both parts: the given names, or else known ones."""
    there = Storage(path, **(storage or {}))
    wanted = [_names(part, each) for part, each in zip(("train", "test"), given, strict=True)]
    for name in (name for names in wanted for name in names):
        if not _is_there(there, name):
            raise FileNotFoundError(f"{there.url}: {name}: no such file ({HINT})")
    for candidates in known:
        missing = [part for part, names in enumerate(wanted) if not names]
        if all(_is_there(there, candidates[part]) for part in missing):
            return [names or [candidates[part]] for part, names in enumerate(wanted)]
    if not known:
        return wanted
    expected = ", or ".join(f"{train} and {test}" for train, test in known)
    raise FileNotFoundError(f"{there.url}: expected the files {expected} ({HINT})")


def _names(part: str, given: Names) -> list[str]:
    """Return the given names of a part's files."""
    names = [given] if isinstance(given, str) else given or []
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{part}: expected the name of a file, or a list of names, got {given!r}")
    return list(names)


def _is_there(storage: Storage, name: str) -> bool:
    try:
        storage.file(name)
    except FileNotFoundError:
        return False
    return True
