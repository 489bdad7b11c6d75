"""Encoded images in a local LMDB."""

import os
import threading
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np

from datacache.errors import SourceChanged
from datacache.manifest import Manifest, Texts
from datacache.order import Ids
from datacache.sources.base import Source, changed_files, check_ids, labels_by_folder, stamps
from datacache.storage import File, ProgressCallback, no_report

LABEL_BYTES = 8
REPORT_EVERY = 1000  # keys
PROTOCOL = "file://"


class LMDB(Source):
    """Images by key in an LMDB on a local path, which must not be written to while it is used.

    ``labels="value"``: a value is the label, 8 bytes, big-endian, then the image. ``labels="key"``: a value
    is the image, and the class is the part of the key before the first ``/``; labels are indices of the
    classes, sorted by name. Samples are in the order of their keys; keys that begin with ``__`` (lengths,
    lists of keys) are ignored.
    """

    payload = "image"

    def __init__(self, url: str, *, labels: str = "value") -> None:
        if labels not in ("value", "key"):
            raise ValueError(f"labels: expected 'value' or 'key', got {labels!r}")
        path = url.removeprefix(PROTOCOL)
        if "://" in path:
            raise ValueError(f"{url}: an LMDB can only be read from a local path")
        self._path = Path(path)
        self._label_bytes = LABEL_BYTES if labels == "value" else 0
        self._environment: lmdb.Environment | None = None
        self._process = 0

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        stamp = self._stamp()
        sizes, by_value = array("q"), array("q")
        keys = Texts.of(self._keys(sizes, by_value, report))
        classes: tuple[str, ...] = ()
        if self._label_bytes:
            labels = np.array(by_value, np.int64)
        else:
            labels, classes = labels_by_folder(str(self._path), keys)
        return Manifest(
            payload=self.payload,
            files=keys,
            stamps=np.full(len(keys), stamp, np.uint64),
            file=np.arange(len(keys), dtype=np.int32),
            start=np.full(len(keys), self._label_bytes, np.int64),
            sizes=np.array(sizes, np.int64),
            labels=labels,
            classes=classes,
        )

    def read(self, manifest: Manifest, ids: Ids) -> list[bytes]:
        check_ids(manifest, ids)
        payloads = []
        with self._opened().begin(buffers=True) as transaction:
            for sample in ids.tolist():
                key = manifest.files[sample]
                start, size = int(manifest.start[sample]), int(manifest.sizes[sample])
                value = transaction.get(key.encode("utf-8", "surrogateescape"))
                if value is None or len(value) != start + size:
                    raise changed_files(str(self._path), [key])
                payloads.append(bytes(value[start:]))
        return payloads

    def check(self, manifest: Manifest) -> None:
        if (manifest.stamps != self._stamp()).any():
            raise SourceChanged(
                f"{self._path}: was written to after the manifest was made; build the manifest again"
            )

    def _keys(self, sizes: "array[int]", labels: "array[int]", report: ProgressCallback) -> Iterator[str]:
        """Yield the key of each sample, after adding to ``sizes`` and ``labels``."""
        environment = self._opened()
        total = environment.stat()["entries"]
        with environment.begin(buffers=True) as transaction:
            for done, (found, value) in enumerate(transaction.cursor()):
                if done % REPORT_EVERY == 0:
                    report(done, total)
                key = bytes(found)
                if key.startswith(b"__"):
                    continue
                if self._label_bytes:
                    labels.append(self._label(key, value))
                sizes.append(len(value) - self._label_bytes)
                yield key.decode("utf-8", "surrogateescape")
        report(total, total)

    def _label(self, key: bytes, value: memoryview) -> int:
        label = int.from_bytes(value[:LABEL_BYTES], "big", signed=True)
        if len(value) < LABEL_BYTES or label < 0:
            raise ValueError(
                f"{self._path}: key {key!r}: expected a label in the value's first {LABEL_BYTES} bytes, got "
                f"{bytes(value[:LABEL_BYTES])!r}; are the labels in the keys (labels: key)?"
            )
        return label

    def _stamp(self) -> np.uint64:
        data = self._path / "data.mdb" if self._path.is_dir() else self._path
        written, info = self._opened().info()["last_txnid"], data.stat()
        return stamps([File("", info.st_size, f"{info.st_mtime_ns} {written}")])[0]

    def _opened(self) -> lmdb.Environment:
        if self._environment is None or self._process != os.getpid():  # none may be used after a fork
            self._environment = _open(self._path)
            self._process = os.getpid()
        return self._environment


_ENVIRONMENTS = weakref.WeakValueDictionary[tuple[str, int], lmdb.Environment]()
_OPENING = threading.Lock()


def _open(path: Path) -> lmdb.Environment:
    """Return the only environment of a path in this process: LMDB forbids a second one."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected an LMDB, found nothing")
    with _OPENING:
        key = (os.path.realpath(path), os.getpid())
        environment = _ENVIRONMENTS.get(key)
        if environment is None:
            options = {"subdir": path.is_dir(), "readonly": True, "lock": False, "readahead": False}
            try:
                environment = lmdb.open(str(path), **options)
            except lmdb.Error as error:
                raise ValueError(f"{path}: expected an LMDB: {error}") from error
            _ENVIRONMENTS[key] = environment
        return environment
