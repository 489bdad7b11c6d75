"""Threads for requests that may stall."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Answer = TypeVar("Answer")

IDLE_SECONDS = 5.0


class ThreadPool:
    """Daemon threads, one for each job under way: nobody waits for one that stalls, not even at exit."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def start(self, job: Callable[[], Answer]) -> "Future[Answer]":
        """Run the job, now."""
        future: Future[Answer] = Future()
        self._jobs.put((future, job))
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name="datacache-storage", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            try:
                future, job = self._jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                if self._idle.acquire(blocking=False):
                    return
                continue  # a job is on its way, and counts on this thread
            _run(future, job)
            del future, job  # they hold what was read
            self._idle.release()


def _run(future: "Future[Any]", job: Callable[[], Any]) -> None:
    try:
        result = job()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
