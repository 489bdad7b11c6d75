"""Processor time that is told, not measured, to put in the place of ``machines.time``."""

import threading

WORK_SECONDS = 0.02


class ProcessorTime(threading.local):
    """Stands for ``time``: each thread has used as much processor time as it says it has."""

    used_seconds = 0.0

    def thread_time(self):
        return self.used_seconds


processor_time = ProcessorTime()


def compute():
    processor_time.used_seconds += WORK_SECONDS
