"""Vocabularies: SentencePiece models, trained on the training part of a text and kept as files.

>>> texts = ["the cat sat on the mat", "the dog sat on the cat"] * 10
>>> vocabulary = Vocabulary.train(texts, VocabularySettings(size=10, type="word"))
>>> vocabulary.encode(["the dog sat", "a cat"])
[[4, 8, 7, 3], [1, 5, 3]]
>>> vocabulary.decode([4, 8, 7, 3, 0, 0])
'the dog sat'
"""

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from commlib.errors import look_up, one_line, shown
from commlib.folders import user_cache
from commlib.registry import check_options
from datacache import StoredSource, Untrusted
from datacache.storage import check_whole
from datacache.store import locks
from datacache.store.files import make_folder, read_file, write_atomic

PAD, UNKNOWN, START, END, MASK = range(5)
SPECIAL = 5  # tokens that are no text, the mask included
TYPES = dict.fromkeys(("unigram", "bpe", "word"))
WORD = "▁"  # SentencePiece's mark of where a word begins
FORMAT = 1  # to be raised when the same text and settings give another vocabulary
THREADS = 8  # of SentencePiece's trainer: its result depends on their number
MOST_LINES = 1_000_000  # that a vocabulary is trained on
LONGEST_LINE = 1 << 20  # bytes
READ_LINES = 1 << 14
DIGEST_BYTES = 32  # before the model in a file
TRAINING_SECONDS = 1800.0  # that a process waits for another to train, before it trains by itself


@dataclass(frozen=True)
class VocabularySettings:
    """How a vocabulary is made.

    ``size``: its tokens, special ones included. ``type``: ``unigram`` or ``bpe`` (pieces of words), or
    ``word``. ``mask``: whether it has a token that masks others, for masked language models.
    """

    size: int = 8000
    type: str = "unigram"
    mask: bool = False

    def __post_init__(self) -> None:
        check_whole(least=SPECIAL + 1, **{"vocabulary.size": self.size})
        look_up(TYPES, "vocabulary.type", self.type)
        if self.mask not in (True, False):
            raise ValueError(f"vocabulary.mask: expected true or false, got {shown(self.mask)}")

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> "VocabularySettings":
        """Return the settings of a configuration's record; a ``ValueError`` names the wrong key."""
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(f"vocabulary: expected keys and values, got {shown(options)}")
        check_options("vocabulary", cls, options or {})
        return cls(**(options or {}))


class Vocabulary:
    """Tokens of text and back: 0 pads, 1 is unknown, 2 starts and 3 ends a text, 4 may be the mask."""

    size: int
    """The number of tokens, special ones included."""
    has_mask: bool

    def __init__(self, model: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self.model = model
        self.fingerprint: str = xxh3_128_hexdigest(model)
        self._processor = SentencePieceProcessor(model_proto=model)
        self.size = int(self._processor.get_piece_size())
        self.has_mask = self.size > MASK and bool(self._processor.is_control(MASK))
        pieces = [self._processor.id_to_piece(token) for token in range(self.size)]
        words = {piece: token for token, piece in enumerate(pieces) if piece.startswith(WORD)}
        # only vocabularies of words have no piece that goes on within a word
        self._words = words if len(words) + MASK + self.has_mask == self.size else None

    @classmethod
    def train(cls, texts: Iterable[str], settings: VocabularySettings) -> "Vocabulary":
        """Return the vocabulary of texts: the same in every process and on every machine.

        Raises a ``ValueError`` of one line if the text does not allow the size.
        """
        from sentencepiece import SentencePieceTrainer

        model = io.BytesIO()
        try:
            SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=model,
                vocab_size=settings.size,
                model_type=settings.type,
                pad_id=PAD,
                unk_id=UNKNOWN,
                bos_id=START,
                eos_id=END,
                control_symbols=["<mask>"] if settings.mask else [],
                max_sentence_length=LONGEST_LINE,
                num_threads=THREADS,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise ValueError(_reason(str(error), settings)) from error
        return cls(model.getvalue())

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text, which end with 3; any thread may call it."""
        if (known := self._words) is None:
            tokens: list[list[int]] = self._processor.encode(texts, add_eos=True, num_threads=1)
            return tokens
        # SentencePiece merges unknown words in a row into one.
        lines = (text.split(WORD)[1:] for text in self._processor.normalize(texts))
        return [[*(known.get(WORD + word, UNKNOWN) for word in words), END] for words in lines]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens up to the first end, without other special tokens."""
        text = takewhile(lambda token: token != END, map(int, tokens))
        return str(self._processor.decode([token for token in text if not self._processor.is_control(token)]))


def vocabulary_of(source: StoredSource, settings: VocabularySettings) -> Vocabulary:
    """Return the vocabulary of a text: from the user's cache, or trained by one process while others wait."""
    folder = user_cache() / "vocabularies"
    files = source.files()
    facts = f"{FORMAT} {type(source).__name__} {source.url} {files} {settings}"
    key = xxh3_128_hexdigest(facts.encode("utf-8", "surrogatepass"))
    path = folder / f"{key}.vocabulary"
    try:
        make_folder(folder)
        with locks.exclusive(path.with_suffix(".lock"), TRAINING_SECONDS):
            found = _kept(path)
            if found is None:
                found = Vocabulary.train(_lines(source), settings)
                with suppress(OSError):  # without room for it, it is made again in the next run
                    write_atomic(path, found.fingerprint.encode() + found.model)
            return found
    except Untrusted:
        raise
    except OSError:  # the folder cannot be written
        return Vocabulary.train(_lines(source), settings)


def _kept(path: Path) -> Vocabulary | None:
    """Return the vocabulary of a file; ``None`` if there is none or, with a warning, if it is damaged."""
    if not path.exists():
        return None
    content = read_file(path)
    digest, model = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if digest != xxh3_128_hexdigest(model).encode():
        warnings.warn(f"{path}: damaged, the vocabulary is made again", stacklevel=4)
        return None
    return Vocabulary(model)


def _lines(source: StoredSource) -> Iterator[str]:
    """Yield the lines of a source's samples, or of a million samples spread over the text."""
    manifest = source.scan()
    samples = np.unique(np.linspace(0, len(manifest) - 1, min(len(manifest), MOST_LINES)).astype(np.int64))
    for ids in np.array_split(samples, -(-len(samples) // READ_LINES)):
        for payload in source.read(manifest, ids):
            yield from payload.decode().split("\n")


def _reason(message: str, settings: VocabularySettings) -> str:
    """Return SentencePiece's error as one line that names the setting."""
    if found := re.search(r"size too high .* value <= (\d+)", message):
        return f"vocabulary.size: expected at most {found[1]} for this text, got {settings.size}"
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        expected = f"at least {found[1]}, one for each character of the text and each special token"
        return f"vocabulary.size: expected {expected}, got {settings.size}"
    if "!sentences_.empty()" in message:
        return f"vocabulary: expected lines of at most {LONGEST_LINE:,} bytes, got longer ones only"
    return f"vocabulary: SentencePiece cannot make it: {one_line(message)}"
