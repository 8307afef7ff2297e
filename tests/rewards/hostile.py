"""Rewards that do to their process what the completion says. Importable by worker processes, and free of torch."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time

from stapo_lightning.rewards import Reward


def _crash_stack():
    sys.setrecursionlimit(10**9)
    text = "1"
    for _ in range(2_000_000):
        text = [text]
    return repr(text)


class Obeys(Reward):
    """Each text is a verb and an argument; anything else is the value itself."""

    def __call__(self, completions):
        return [self._obey(*c.text.partition(" ")[::2]) for c in completions]

    def _obey(self, verb, argument):
        if verb == "sleep":
            time.sleep(float(argument))
            return 1.0
        if verb == "exit":
            os._exit(int(argument))
        if verb == "sysexit":
            sys.exit(int(argument))
        if verb == "segfault":
            ctypes.string_at(0)
        if verb == "overflow":
            _crash_stack()
        if verb == "bignum":  # holds the GIL for a minute or more
            return float(len(str(10**10**8 // 3)))
        if verb == "regex":
            return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))
        if verb == "child":  # starts a process, writes down its number, and waits for it
            child = subprocess.Popen(["sleep", "300"])
            with open(argument, "w") as file:
                file.write(str(child.pid))
            child.wait()
        if verb == "orphan":  # starts a process and leaves it behind with a crash
            child = subprocess.Popen(["sleep", "300"])
            with open(argument, "w") as file:
                file.write(str(child.pid))
            os._exit(1)
        if verb == "pid":
            return float(os.getpid())
        if verb == "threads":
            return float(os.environ["OMP_NUM_THREADS"])
        if verb == "torch":
            return float("torch" in sys.modules or "lightning" in sys.modules)
        if verb == "alarm":
            return _stopped_by_alarm()
        if verb == "interrupt":  # what Ctrl-C in a terminal sends
            os.kill(os.getpid(), signal.SIGINT)
            return 1.0
        if verb == "length":
            return float(len(argument))
        return {"none": None, "nan": float("nan"), "inf": float("inf")}.get(verb) if verb.isalpha() else float(verb)


def _stopped_by_alarm():
    # As math-verify and others limit themselves: only the main thread may.
    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(30)
    except TimeoutError:
        return 0.25
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Raises(Reward):
    """Reads the completion as a number."""

    def __call__(self, completions):
        return [float(c.text) for c in completions]


class Fixed(Reward):
    """Returns the same whatever it is asked."""

    def __init__(self, value):
        self.value = value

    def __call__(self, completions):
        return self.value


class HangsOnce(Reward):
    """Compares the end of the text with the answer; sleeps 60 s on the first row of all.

    Args:
        lock: Path of a file that is made by that row.

    """

    def __init__(self, lock):
        self.lock = lock

    def __call__(self, completions):
        return [self._score(c) for c in completions]

    def _score(self, completion):
        try:
            os.close(os.open(self.lock, os.O_CREAT | os.O_EXCL))  # the first row that is asked for
        except FileExistsError:
            return float(completion.text.endswith(f"\\boxed{{{completion.prompt.answer}}}"))
        time.sleep(60)


class Unloadable(Reward):
    """Cannot be loaded elsewhere."""

    def __setstate__(self, state):
        raise OSError("the file of rules is missing")

    def __getstate__(self):
        return {"rules": 1}

    def __call__(self, completions):
        return [1.0] * len(completions)


class HoldsLambda(Reward):
    """Cannot be pickled."""

    def __init__(self):
        self.rule = lambda text: 1.0

    def __call__(self, completions):
        return [self.rule(c.text) for c in completions]


class DiesWhenIdle(Reward):
    """Dies a moment after its answer, when it has nothing to do."""

    def __call__(self, completions):
        import threading

        threading.Timer(0.05, os._exit, [0]).start()
        return [float(c.text) for c in completions]
