"""What is known of data sets without reading them, and generated ones in their place: for dry runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from training.datasets.vocabulary import VocabularySettings


@dataclass(frozen=True)
class ImageFacts:
    """Properties of a data set of images. ``samples``: to train on."""

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
    classes = given.get("classes", facts.classes)
    return {"name": "synthetic", "samples": facts.samples, "classes": classes, "channels": facts.channels}


TEXTS = {"text": "lines", "parallel_text": "pairs", "labelled_text": "labelled"}
TEXT_SAMPLES = 20_000  # how many a text has is not known without its files
WORDS = 30


def _text(given: Mapping[str, Any]) -> dict[str, Any]:
    settings = VocabularySettings.of(given.get("vocabulary"))
    facts = {"tokens": settings.size, "samples": TEXT_SAMPLES, "words": WORDS}
    return {"name": "synthetic_text", "kind": TEXTS[given["name"]], **facts}


# By name: the keys of a generated data set of as many samples of the same kind, from those that are given.
STAND_INS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    **dict.fromkeys(KNOWN, _images),
    **dict.fromkeys(TEXTS, _text),
}
