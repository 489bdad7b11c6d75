"""Threads for requests to central storage, which may stall."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Answer = TypeVar("Answer")

IDLE_SECONDS = 5.0


class ThreadPool:
    """Daemon threads, as many as there are running jobs: a stalled job delays neither others nor the exit.

    ``concurrent.futures.ThreadPoolExecutor`` would queue jobs behind stalled ones, and join them at exit.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def submit(self, job: Callable[[], Answer]) -> "Future[Answer]":
        """Start the job at once, in an idle thread or a new one."""
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
                continue  # a job that relies on this thread is being submitted
            _run(future, job)
            del future, job  # they refer to the result
            self._idle.release()


def _run(future: "Future[Any]", job: Callable[[], Any]) -> None:
    try:
        result = job()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
