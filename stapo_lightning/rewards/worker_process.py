"""What runs inside a process of `RewardWorkers`: it reads completions from a socket and answers with their rewards."""

from __future__ import annotations

import math
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from stapo_lightning.errors import RewardError
from stapo_lightning.rewards.reward import Completion, Reward, checked_values

# Memory shared with the parent: when the row at hand was started (time.monotonic) and its place in the chunk, -1 for
# none yet. Whoever kills this process learns from it which row to blame.
MARK = struct.Struct("dq")

# A chunk ends after this time, done or not: rows that wait behind slow ones can go to another process.
SLICE_S = 0.1

_MESSAGE_CHARS, _TRACEBACK_CHARS = 500, 4000


def main(connection_fd: int, lifeline_fd: int, mark_fd: int, timeout_s: float) -> None:
    """Serves until the parent closes the connection or dies.

    Args:
        connection_fd: Socket of the messages.
        lifeline_fd: Read end of a pipe into which nobody writes; it closes with the parent.
        mark_fd: A file that holds one MARK.
        timeout_s: Longest wall time of one row, which the parent enforces.

    """
    for fd in (connection_fd, lifeline_fd, mark_fd):
        os.set_inheritable(fd, False)
    _die_with_parent(lifeline_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_first_when_memory_ends()
    # These errors: the parent is gone or wants no more.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(Connection(connection_fd), mmap.mmap(mark_fd, MARK.size), timeout_s)
    # Threads that a reward left running must not keep the process.
    os._exit(0)


def _serve(connection: Connection, mark: mmap.mmap, timeout_s: float) -> None:
    scorer: _Scorer | None = None
    while True:
        message = connection.recv_bytes()
        try:
            content = pickle.loads(message)
        except BaseException:
            connection.send(("unreadable", _traceback()))
            return
        if scorer is None:
            scorer = _Scorer(content, mark, timeout_s)
            connection.send(("ready",))
        else:
            connection.send(scorer(content))


class _Scorer:
    def __init__(self, reward: Reward, mark: mmap.mmap, timeout_s: float) -> None:
        self.reward = reward
        self.mark = mark
        self.timeout_s = timeout_s
        self.shape_seen = False

    def __call__(self, completions: Sequence[Completion]) -> tuple[Any, ...]:
        """("scored", values of the first rows, [(place, message, traceback)]) or ("broken", message)."""
        values: list[float] = []
        raised: list[tuple[int, str, str]] = []
        ends = time.monotonic() + SLICE_S
        for place, completion in enumerate(completions):
            started = time.monotonic()
            MARK.pack_into(self.mark, 0, started, place)
            try:
                values += checked_values(self.reward, [completion])
                if not self.shape_seen and time.monotonic() - started < self.timeout_s / 4:
                    self._check_shape(completion, place)
            except RewardError as error:
                return ("broken", str(error))
            except BaseException as error:
                del values[place:]
                values.append(math.nan)
                message = "".join(traceback.format_exception_only(error)).strip()
                raised.append((place, message[:_MESSAGE_CHARS], _traceback()))
            if time.monotonic() > ends:
                break
        return ("scored", values, raised)

    def _check_shape(self, completion: Completion, place: int) -> None:
        # One row at a time would hide a reward that returns one value for however many completions.
        MARK.pack_into(self.mark, 0, time.monotonic(), place)
        self.shape_seen = True
        try:
            checked_values(self.reward, [completion, completion])
        except RewardError:
            raise
        except Exception:
            pass  # it scores one row, which is all that is asked of it here


def _traceback() -> str:
    return traceback.format_exc()[-_TRACEBACK_CHARS:]


def _die_with_parent(lifeline_fd: int) -> None:
    """Has the kernel kill this process and its children when the parent dies, whatever they are doing."""
    import fcntl  # not on Windows, where this module is imported but not run

    if hasattr(fcntl, "F_SETSIG"):
        # The closing of the pipe sends SIGKILL to the whole process group. PR_SET_PDEATHSIG would spare the children
        # of a reward, and would strike when the thread ends that started this process.
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | fcntl.FASYNC)
    if select.select([lifeline_fd], [], [], 0)[0]:
        os._exit(0)  # it died before


def _die_first_when_memory_ends() -> None:
    if sys.platform == "linux":
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # the trainer is worth more than a row
        except OSError:
            pass
