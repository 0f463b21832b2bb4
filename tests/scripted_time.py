"""Time that does not depend on the machine."""

import threading


class ScriptedTime:
    """Stands in for the module `time` in a module under test: each thread's clock, which its own sleep alone moves."""

    def __init__(self):
        self._now_s = threading.local()

    def perf_counter(self):
        return getattr(self._now_s, "value", 0.0)

    def sleep(self, duration_s):
        self._now_s.value = self.perf_counter() + duration_s
