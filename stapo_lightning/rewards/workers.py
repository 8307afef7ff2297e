"""RewardWorkers: a reward in processes that can be killed, so that a row that hangs or crashes costs itself alone."""

from __future__ import annotations

import logging
import math
import mmap
import os
import pickle
import pickletools
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryFile
from typing import Any

from stapo_lightning.errors import RewardError
from stapo_lightning.rewards.reward import Completion, Reward, ScoredRows, reward_name
from stapo_lightning.rewards.worker_process import MARK

_log = logging.getLogger(__name__)

_IN_PROCESS = "set data.reward_workers: 0 to run it in the training process"

# Processes lost one after the other, for each worker and without any answer in between, after which a call gives up.
_PATIENCE = 4

# Until a process has imported what the reward needs; also the longest that a message may take to be read.
_START_LIMIT_S = 120.0

_LARGEST_CHUNK = 128

_CHILD = (
    "import sys; arguments, sys.path[:], sys.argv[1:] = sys.argv[1:5], sys.argv[5:], [];"
    " from stapo_lightning.rewards.worker_process import main; main(*map(int, arguments[:3]), float(arguments[3]))"
)

_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


class RewardWorkers:
    """Runs a reward in processes of its own, one completion at a time, each within a limit of wall time.

    The processes are started by the first call of `score` and kept. A row that does not return in time, or that takes
    its process down, is given up; the process is killed with all that it started, and replaced. The reward gets one
    completion at a time, on the main thread of its process, and a copy of it lives in each process: what it remembers
    is not shared. POSIX only.

    Args:
        reward: Scores completions. It is pickled, so its class must stand in a module that can be imported.
        workers: Processes, at least 1, one thread each.
        timeout_s: Longest wall time of one completion's reward in seconds, above 0.

    Raises:
        RewardError: The reward cannot be pickled.

    """

    def __init__(self, reward: Reward, workers: int, timeout_s: float) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        self._name = reward_name(reward)
        self._payload = _pickled(reward)
        self._pool: list[_Worker] = []
        self._chunk = 1
        self._traceback_shown = False
        self._closer = weakref.finalize(self, _close, self._pool, os.getpid())

    def score(self, completions: Sequence[Completion]) -> ScoredRows:
        """One value a completion, in order; nan for a row that raised, crashed or took longer than `timeout_s`.

        A row that hangs costs its process `timeout_s` and the start of another, while the rest goes on elsewhere: at
        most ceil(rows / workers) * (timeout_s + a start) in all. Where nothing but hanging or crashing rows is met,
        4 a worker in a row, the rows left are given up and counted like the last one: a reward that hangs on all rows
        costs 4 * (timeout_s + a start) a call. Rows are taken in an order that keeps neighbours apart, so that the
        completions of one poisonous prompt do not look like that.

        Raises:
            RewardError: The number of values differs from the number of completions, every row raised or crashed, or a
                process could not load the reward.

        """
        wave = _Wave(completions)
        try:
            while wave.unfinished:
                self._hand_out(wave)
                self._collect(wave)
                if wave.losses >= _PATIENCE * self.workers:
                    self._give_up(wave)
            return self._report(wave)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills the processes; a later `score` starts new ones."""
        _close(self._pool, os.getpid())

    def _hand_out(self, wave: _Wave) -> None:
        busy = sum(bool(worker.rows) for worker in self._pool)
        while len(self._pool) < min(self.workers, len(wave.pending) + busy):
            self._pool.append(_Worker(self._payload, self.timeout_s))
        for worker in list(self._pool):
            if worker.ready and not worker.rows and wave.pending:
                rows = wave.take(min(self._chunk, math.ceil(len(wave.pending) / self.workers)))
                try:
                    worker.send(rows, [wave.completions[row] for row in rows])
                except OSError:  # it died since its last answer: no fault of these rows
                    wave.put_back(rows)
                    wave.lost(f"its worker process died between two rows ({self._replace(worker)})")

    def _collect(self, wave: _Wave) -> None:
        waiting = [worker for worker in self._pool if worker.rows or not worker.ready]
        ends = min((worker.deadline(self.timeout_s) for worker in waiting), default=0.0)
        answered = wait([worker.connection for worker in waiting], min(max(0.0, ends - time.monotonic()), 60.0))
        now = time.monotonic()
        for worker in waiting:
            if worker.connection in answered:
                self._read(worker, wave)
            elif now >= worker.deadline(self.timeout_s):
                self._stop(worker, wave, now)

    def _read(self, worker: _Worker, wave: _Wave) -> None:
        try:
            kind, *content = worker.connection.recv()
        except (EOFError, OSError):
            rows, ended = worker.rows, self._replace(worker)
            place = worker.mark()[1]
            reason = f"its worker process died ({ended})"
            wave.lost(reason)
            if rows and place >= 0:
                wave.raised[rows.pop(place)] = (reason, "")
            wave.put_back(rows)
            return
        if kind == "ready":
            worker.ready = True
        elif kind == "scored":
            done = len(content[0])
            wave.scored(worker.rows[:done], *content)
            wave.put_back(worker.rows[done:])
            worker.rows = []
            # As many as fit in a slice: a chunk grows while it is done in time.
            self._chunk = min(2 * done, _LARGEST_CHUNK)
        elif kind == "broken":
            raise RewardError(content[0])
        else:
            raise RewardError(f"{self._name} cannot be loaded in a worker process; {_IN_PROCESS}\n{content[0]}")

    def _stop(self, worker: _Worker, wave: _Wave, now: float) -> None:
        if not worker.ready:
            raise RewardError(
                f"{self._name}: a worker process was not ready after {_START_LIMIT_S:.0f} s; look at what it"
                f" imports, or {_IN_PROCESS}"
            )
        rows = worker.rows
        self._replace(worker)
        started, place = worker.mark()  # it may have gone on to another row until it was killed
        wave.lost(None)
        if place >= 0 and now - started >= self.timeout_s:
            wave.timed_out.add(rows.pop(place))
        wave.put_back(rows)

    def _replace(self, worker: _Worker) -> str:
        self._pool.remove(worker)
        ended = worker.kill()
        # The rows before the one to blame are scored again, and alone: the next loss must not cost them once more.
        self._chunk = 1
        # At once: it imports what it needs while other rows are scored, or while the policy trains.
        self._pool.append(_Worker(self._payload, self.timeout_s))
        return ended

    def _give_up(self, wave: _Wave) -> None:
        for worker in [worker for worker in self._pool if worker.rows]:
            wave.put_back(worker.rows)
            self._replace(worker)
        rows = wave.take(len(wave.pending))
        if wave.last_loss is None:
            wave.timed_out.update(rows)
        else:
            wave.raised.update(dict.fromkeys(rows, (wave.last_loss, "")))
        _log.warning(
            "%s: gave up %d of %d completions after %d processes were lost in a row without an answer",
            self._name, len(rows), len(wave.completions), wave.losses,
        )  # fmt: skip

    def _report(self, wave: _Wave) -> ScoredRows:
        count = len(wave.completions)
        if wave.raised:
            message, trace = wave.raised[max(wave.raised)]
            if len(wave.raised) == count:
                text = f"{self._name} raised on every one of {count} completions, the last time {message}\n{trace}"
                raise RewardError(text.rstrip())
            message, trace = wave.raised[min(wave.raised)]
            shown = "" if self._traceback_shown else f"\n{trace}".rstrip()
            self._traceback_shown = self._traceback_shown or bool(trace)
            _log.warning(
                "%s raised on %d of %d completions (left out of their groups), first %s%s",
                self._name, len(wave.raised), count, message, shown,
            )  # fmt: skip
        if wave.timed_out:
            _log.warning(
                "%s did not return within %g s on %d of %d completions (left out of their groups)",
                self._name, self.timeout_s, len(wave.timed_out), count,
            )  # fmt: skip
        values = [wave.values.get(row, math.nan) for row in range(count)]
        missing = sum(math.isnan(value) for value in values)
        return ScoredRows(values, missing - len(wave.timed_out), len(wave.timed_out))


class _Wave:
    """The state of one call of `score`: each row is pending, with a worker, or in one of the three outcomes."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.completions = completions
        self.pending = deque(_spread(len(completions)))
        self.values: dict[int, float] = {}
        self.raised: dict[int, tuple[str, str]] = {}
        self.timed_out: set[int] = set()
        self.losses = 0
        self.last_loss: str | None = None

    @property
    def unfinished(self) -> int:
        return len(self.completions) - len(self.values) - len(self.raised) - len(self.timed_out)

    def take(self, count: int) -> list[int]:
        return [self.pending.popleft() for _ in range(count)]

    def put_back(self, rows: Iterable[int]) -> None:
        self.pending.extendleft(reversed(list(rows)))

    def scored(self, rows: Sequence[int], values: Sequence[float], raised: Sequence[tuple[int, str, str]]) -> None:
        failed = {rows[place]: (message, trace) for place, message, trace in raised}
        self.raised |= failed
        self.values |= {row: value for row, value in zip(rows, values, strict=True) if row not in failed}
        self.losses = 0

    def lost(self, reason: str | None) -> None:
        """Counts a process that was lost; None: for its time."""
        self.losses += 1
        self.last_loss = reason


class _Worker:
    """One process, seen from the parent.

    Args:
        payload: The pickled reward.
        timeout_s: Longest wall time of one row.

    """

    def __init__(self, payload: bytes, timeout_s: float) -> None:
        self.rows: list[int] = []
        self.ready = False
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        # A process that stops reading or writing in the middle of a message must not stop this one.
        limit = struct.pack("ll", int(_START_LIMIT_S), 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        with TemporaryFile() as file:
            file.truncate(MARK.size)
            self._mark = mmap.mmap(file.fileno(), MARK.size)
            fds = (theirs.fileno(), lifeline, file.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, *map(str, fds), str(timeout_s), *filter(_is_text, sys.path)],
                pass_fds=fds,
                env=os.environ | _ONE_THREAD,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a group to kill as one, which the terminal's Ctrl-C does not reach
            )
        theirs.close()
        os.close(lifeline)
        self._started = time.monotonic()
        self.connection = Connection(ours.detach())
        with suppress(OSError):  # where it has died already, the next read says so
            self.connection.send_bytes(payload)

    def send(self, rows: list[int], completions: list[Completion]) -> None:
        """Gives it rows; it must be ready and without any.

        Raises:
            OSError: It is dead or does not read.

        """
        MARK.pack_into(self._mark, 0, time.monotonic(), -1)
        self.connection.send(completions)
        self.rows = rows

    def deadline(self, timeout_s: float) -> float:
        """When (time.monotonic) the row at hand, or the start, has taken too long."""
        return self.mark()[0] + timeout_s if self.ready else self._started + _START_LIMIT_S

    def mark(self) -> tuple[float, int]:
        """When the row at hand was started and its place in `rows`, -1 for none."""
        started, place = MARK.unpack_from(self._mark)
        return started, place

    def kill(self) -> str:
        """Ends the process and all that it started in its session; returns how it ended, such as "SIGSEGV"."""
        # Before it is waited for: until then its number, which is also the group's, cannot be another's.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self.connection.close()
        os.close(self._lifeline)
        code = self._process.returncode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _close(pool: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # a fork of the owner has its list, not its processes
        while pool:
            pool.pop().kill()


def _pickled(reward: Reward) -> bytes:
    try:
        payload = pickle.dumps(reward)
    except Exception as error:
        raise RewardError(
            f"{reward_name(reward)} cannot be pickled for the worker processes ({type(error).__name__}: {error});"
            f" define its class at the top level of a module and keep open files, locks and lambdas out of it, or"
            f" {_IN_PROCESS}"
        ) from error
    if b"__main__" in payload and any(argument == "__main__" for _, argument, _ in pickletools.genops(payload)):
        raise RewardError(
            f"{reward_name(reward)} is or holds something defined in the script that was started, which worker"
            f" processes do not run again; move it into a module of its own, or {_IN_PROCESS}"
        )
    return payload


def _spread(count: int) -> list[int]:
    """0 .. count - 1 in a fixed order in which neighbours are far apart."""
    step = max(1, round(count * 0.618))
    while math.gcd(step, count) > 1:
        step += 1
    return [place * step % count for place in range(count)]


def _is_text(entry: Any) -> bool:
    return isinstance(entry, str)
