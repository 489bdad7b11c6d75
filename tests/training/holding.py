"""A process that holds the lock of a run; it imports no TensorFlow."""

from multiprocessing.connection import Connection
from pathlib import Path

from training.run_folder import RunLock


def hold(folder: Path, pipe: Connection) -> None:
    """Hold the lock of a folder until a message comes."""
    lock = RunLock(folder)
    pipe.send("held")
    pipe.recv()
    lock.release()
