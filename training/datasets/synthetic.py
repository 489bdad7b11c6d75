"""Generated pictures and text, of any size, that can be learned; and stand-ins for real data in dry runs.

>>> from datacache import unpack_tokens
>>> dataset = synthetic_text(tokens=20, samples=3, test_samples=1, words=4)
>>> manifest = dataset.manifest("training")
>>> lines = dataset.training.read(manifest, np.arange(3))
>>> [dataset.vocabulary.decode(unpack_tokens(line)[0]) for line in lines]
['12 7 7 8', '14 14', '4 13']
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from commlib.errors import look_up
from datacache import Arrays, Manifest, ProgressCallback, Source, SourceChanged, Tokenized
from datacache.manifest import Texts
from datacache.order import Ids
from datacache.sources.base import check_ids
from datacache.storage import check_whole, no_report
from training.datasets.dataset import Dataset, ImageDataset
from training.datasets.text import LabelledTextDataset, ParallelTextDataset, TextDataset
from training.datasets.vocabulary import END, SPECIAL, Vocabulary, VocabularySettings

GRID = 4  # patches in a row and in a column of a pattern: coarse, so that it survives any resizing
_PATTERNS, _TRAINING, _TEST = range(3)  # keys of the random streams

Pixels = npt.NDArray[np.uint8]


def synthetic(
    *, classes: int = 10, side: int = 32, channels: int = 3, samples: int = 4096, test_samples: int = 1024
) -> ImageDataset:
    """Return ``samples`` pictures of ``side`` × ``side`` pixels to train on, ``test_samples`` to test on.

    A picture is the mean of its class's pattern of patches and of uniform noise; sample ``i`` is of class
    ``i mod classes``. Equal arguments give equal pictures, which are held in memory.
    """
    check_whole(least=1, classes=classes, side=side, channels=channels)
    check_whole(least=1, samples=samples, test_samples=test_samples)
    patches = _random(_PATTERNS).integers(0, 256, (classes, GRID, GRID, channels), np.uint8)
    patch_of_pixel = np.arange(side) * GRID // side
    patterns = patches[:, patch_of_pixel[:, np.newaxis], patch_of_pixel]
    training, test = (_noisy(patterns, *part) for part in ((samples, _TRAINING), (test_samples, _TEST)))
    return ImageDataset(training, test, channels=channels, classes=classes)


def _noisy(patterns: Pixels, samples: int, key: int) -> Arrays:
    random, classes = _random(key), len(patterns)
    images = np.empty((samples, *patterns.shape[1:]), np.uint8)
    for sample, image in enumerate(images):
        noise = random.integers(0, 256, image.shape, np.uint8)
        np.add(noise >> 1, patterns[sample % classes] >> 1, out=image)
    return Arrays(images, np.arange(samples) % classes)


def _random(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key))


KINDS = dict.fromkeys(("lines", "pairs", "labelled"))


class Numbers(Vocabulary):
    """The numbers ``0 … size - 6`` as words, and the special tokens with a mask."""

    def __init__(self, size: int) -> None:
        self.size, self.has_mask = size, True
        self.model = f"numbers {size}".encode()
        self.fingerprint = xxhash.xxh3_128_hexdigest(self.model)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[*(int(word) + SPECIAL for word in text.split()), END] for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        text = takewhile(lambda token: token != END, map(int, tokens))
        return " ".join(str(token - SPECIAL) for token in text if token >= SPECIAL)


class TextsInMemory(Source):
    """Payloads of text, with labels."""

    payload = "text"

    def __init__(self, payloads: Sequence[bytes], labels: Sequence[int], classes: Sequence[str] = ()) -> None:
        self._payloads, self._labels, self._classes = payloads, labels, tuple(classes)

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        count = len(self._payloads)
        report(count, count)
        return Manifest(
            payload=self.payload,
            files=Texts.of(["memory"]),
            stamps=np.array([self._stamp()], np.uint64),
            file=np.zeros(count, np.int32),
            start=np.zeros(count, np.int64),
            sizes=np.array([len(each) for each in self._payloads], np.int64),
            labels=np.array(self._labels, np.int64),
            classes=self._classes,
        )

    def read(self, manifest: Manifest, ids: Ids) -> list[bytes]:
        check_ids(manifest, ids)
        return [self._payloads[sample] for sample in ids.tolist()]

    def check(self, manifest: Manifest) -> None:
        if manifest.stamps.tolist() != [self._stamp()]:
            raise SourceChanged("the texts in memory differ from the texts of the manifest")

    def _stamp(self) -> int:
        return xxhash.xxh3_64_intdigest(b"\0".join(self._payloads))


def synthetic_text(
    *,
    kind: str = "lines",
    tokens: int = 100,
    samples: int = 1000,
    test_samples: int = 100,
    words: int = 12,
    classes: int = 4,
) -> Dataset:
    """Return generated text, the same each time.

    ``kind``: ``lines`` of running text, in which one of two words follows each word; ``pairs``, whose
    translation replaces word ``i`` of ``n`` by word ``n - 1 - i``; or ``labelled`` by the first word modulo
    ``classes``. ``tokens``: of the vocabulary, with five special ones. ``samples`` to train on and
    ``test_samples`` to test on have up to ``words`` words.
    """
    look_up(KINDS, "kind", kind)
    check_whole(least=SPECIAL + 2, tokens=tokens)
    check_whole(least=1, samples=samples, test_samples=test_samples, words=words, classes=classes)
    vocabulary = Numbers(tokens)
    names = tuple(map(str, range(classes)))
    numbers = tokens - SPECIAL
    training, test = (
        Tokenized(_source(kind, _lines(count, words, numbers, part), numbers, names), vocabulary)
        for part, count in enumerate((samples, test_samples))
    )
    if kind == "lines":
        return TextDataset(training, test, vocabulary)
    if kind == "pairs":
        return ParallelTextDataset(training, test, vocabulary)
    return LabelledTextDataset(training, test, vocabulary, names)


def _lines(samples: int, words: int, numbers: int, part: int) -> list[list[int]]:
    """Return lines of numbers: each is three times the one before, plus one or two, modulo ``numbers``."""
    generator = np.random.Generator(np.random.Philox(key=[samples, part]))
    table = np.empty((samples, words), np.int64)
    table[:, 0] = generator.integers(0, numbers, samples)
    for column in range(1, words):
        table[:, column] = (3 * table[:, column - 1] + generator.integers(1, 3, samples)) % numbers
    lengths = generator.integers((words + 1) // 2, words + 1, samples)
    return [line[:length] for line, length in zip(table.tolist(), lengths.tolist(), strict=True)]


def _source(kind: str, lines: list[list[int]], numbers: int, names: tuple[str, ...]) -> TextsInMemory:
    texts = [" ".join(map(str, line)) for line in lines]
    if kind == "pairs":
        translated = (" ".join(str(numbers - 1 - word) for word in line) for line in lines)
        texts = [f"{source}\n{target}" for source, target in zip(texts, translated, strict=True)]
    labels = [line[0] % len(names) if kind == "labelled" else 0 for line in lines]
    payloads = [each.encode() for each in texts]
    return TextsInMemory(payloads, labels, names if kind == "labelled" else ())


@dataclass(frozen=True)
class ImageFacts:
    """What a dry run needs to know of images without reading them. ``samples``: to train on."""

    samples: int
    classes: int
    channels: int


KNOWN = {
    "digits": ImageFacts(1_437, 10, 1),
    "mnist5k": ImageFacts(4_000, 10, 1),
    "cifar10": ImageFacts(50_000, 10, 3),
    "imagenet": ImageFacts(1_281_167, 1000, 3),
}


def _images(given: Mapping[str, Any]) -> dict[str, Any]:
    facts = KNOWN[given["name"]]
    classes = facts.classes if given.get("classes") is None else given["classes"]
    return {"name": "synthetic", "samples": facts.samples, "classes": classes, "channels": facts.channels}


TEXTS = {"text": "lines", "parallel_text": "pairs", "labelled_text": "labelled"}
TEXT_SAMPLES = 20_000  # how many a text has is not known without its files
WORDS = 30


def _text(given: Mapping[str, Any]) -> dict[str, Any]:
    settings = VocabularySettings.of(given.get("vocabulary"))
    facts = {"tokens": settings.size, "samples": TEXT_SAMPLES, "words": WORDS}
    return {"name": "synthetic_text", "kind": TEXTS[given["name"]], **facts}


# By data set: a function from its keys to the keys of a generated data set of the same kind.
STAND_INS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    **dict.fromkeys(KNOWN, _images),
    **dict.fromkeys(TEXTS, _text),
}
