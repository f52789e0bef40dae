"""Ranks that meet by leaving notes in a folder, because they have nothing better.

First they must find each other, for the folder may have notes of a save that was killed. Every rank
but the first says hello with a random number; rank 0 answers each number with the name of the
session. An answer to a number that was drawn just now cannot be an old one. Then each meeting is a
note of every rank, and whoever has all of them goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ..errors import SaveFailed, SaveTimeout
from ._meeting import Company, names_of
from ._storage import NOTE, Board
from ._types import BarrierLike, RankInfo

__all__ = ["ByNotes", "belong_to", "job_name"]

T = TypeVar("T")

_LONGEST_PAUSE = 0.05  # seconds between two looks
_GRACE = 1.0  # seconds for rank 0 to say that it has given up
_FAREWELL = 10.0  # seconds to read notes that are there


class ByNotes(Company):
    """Ranks that meet in a folder; a barrier that cannot carry texts is waited at as well."""

    def __init__(
        self, rank_info: RankInfo, board: Board, *, timeout: float, barrier: BarrierLike | None
    ) -> None:
        super().__init__(rank_info)
        self._board = board
        self._timeout = timeout
        self._barrier = barrier
        self._hail = f"{NOTE}{job_name()}"
        self._nonce = secrets.token_hex(8)
        self._session = ""
        self._standing: int | None = None
        """The lock by which others know that this rank lives."""
        self._meetings = 0
        self._is_whole = False
        """Whether all ranks were there when they last met."""

    def exchange(self, text: str) -> list[str]:
        """Leave a note, and read those of all."""
        self._is_whole = False
        try:
            if not self._session:
                self._session = self._form() if self.rank == 0 else self._enter()
                self._standing = self._board.stand(self._note("here", self.rank))
            self._meetings += 1
            self._board.put(self._note(self._meetings, self.rank), text)
            if self._barrier is not None:
                self._barrier.execute_barrier()
            texts = self._poll(self._collect, self._complain_of_absence)
        except BaseException as error:
            if self._session:
                with suppress(OSError):  # the cause is what counts
                    self._board.put(self._note("gone", self.rank), f"rank {self.rank}: {error}")
            raise
        self._is_whole = True
        return texts

    def _note(self, meeting: int | str, rank: int) -> str:
        return f"{NOTE}{self._session}.{meeting}.{rank}"

    def _form(self) -> str:
        """Wait for the hello of every other rank, and answer it."""
        session = secrets.token_hex(8)
        hellos: dict[int, set[str]] = defaultdict(set)

        def all_are_here() -> bool | None:
            for name in self._board.names():
                if name.startswith(f"{self._hail}.hello."):
                    rank, nonce = name.split(".")[-2:]
                    hellos[int(rank)].add(nonce)
            return True if len(hellos) == self.size - 1 else None

        def complain() -> SaveFailed:
            missing = [rank for rank in range(1, self.size) if rank not in hellos]
            return SaveTimeout(f"{names_of(missing)} did not come within {self._timeout} s")

        try:
            self._poll(all_are_here, complain)
            double = [rank for rank, nonces in hellos.items() if len(nonces) > 1]
            if double:
                raise SaveFailed(f"two processes say that they are {names_of(double)}: two jobs?")
        except SaveFailed as error:
            self._answer(hellos, {"failed": str(error)})
            raise
        self._answer(hellos, {"session": session})
        return session

    def _answer(self, hellos: dict[int, set[str]], answer: dict[str, str]) -> None:
        for nonces in hellos.values():
            for nonce in nonces:
                self._board.put(f"{self._hail}.answer.{nonce}", json.dumps(answer))

    def _enter(self) -> str:
        """Say hello until rank 0 answers, for it may tidy up before it listens."""
        hello = f"{self._hail}.hello.{self.rank}.{self._nonce}"
        answer = f"{self._hail}.answer.{self._nonce}"

        def listen() -> str | None:
            names = self._board.names()
            if answer in names:
                return self._board.get(answer)
            if hello not in names:
                self._board.put(hello, "")
            return None

        def complain() -> SaveFailed:
            return SaveTimeout(f"rank 0 did not come within {self._timeout} s")

        try:
            # Longer than rank 0 waits for the others: it knows who of them is missing.
            patience = self._timeout + min(self._timeout / 2, _GRACE)
            said = json.loads(self._poll(listen, complain, timeout=patience))
        finally:
            self._board.remove(hello)
            self._board.remove(answer)
        if "failed" in said:
            raise SaveFailed(said["failed"])
        session: str = said["session"]
        return session

    def _collect(self) -> list[str] | None:
        names = self._board.names()
        for rank in range(self.size):
            if self._note("gone", rank) in names:
                raise SaveFailed(self._board.get(self._note("gone", rank)) or f"rank {rank} left")
        wanted = [self._note(self._meetings, rank) for rank in range(self.size)]
        if not names.issuperset(wanted):
            self._check_lives([rank for rank, note in enumerate(wanted) if note not in names])
            return None
        texts = [text for name in wanted if (text := self._board.get(name)) is not None]
        return texts if len(texts) == self.size else None

    def _check_lives(self, missing: list[int]) -> None:
        """Do not wait for the dead."""
        for rank in missing:
            if self._board.is_deserted(self._note("here", rank)):
                last = self._note(self._meetings, rank)
                if self._board.get(last) is None:  # it may have come, and gone in peace
                    raise SaveFailed(f"rank {rank} is dead")

    def _complain_of_absence(self) -> SaveFailed:
        names = self._board.names()
        lines = []
        for rank in range(self.size):
            met = [
                meeting
                for meeting in range(1, self._meetings + 1)
                if self._note(meeting, rank) in names
            ]
            if self._meetings not in met:
                lines.append(f"rank {rank} (it was at {len(met)} of {self._meetings} meetings)")
        return SaveTimeout(f"{', '.join(lines)} did not come within {self._timeout} s")

    def close(self) -> None:
        """Part, and have rank 0 take away the notes when everybody has read them."""
        try:
            with suppress(OSError):  # the save has succeeded or failed by now
                self._part()
        finally:
            if self._standing is not None:
                os.close(self._standing)
                self._standing = None

    def _part(self) -> None:
        if not self._session:
            return
        if self.rank != 0:
            self._board.put(self._note("bye", self.rank), "")
        elif self._is_whole:  # else those who come late shall find them; the next save tidies up
            byes = {self._note("bye", rank) for rank in range(1, self.size)}
            try:
                self._poll(
                    lambda: self._board.names().issuperset(byes) or None,
                    lambda: SaveTimeout("nobody says goodbye"),
                    timeout=min(self._timeout, _FAREWELL),
                )
            except SaveTimeout:
                return  # they have what they need, or are dead
            for name in self._board.names():
                if name.startswith(f"{NOTE}{self._session}."):
                    self._board.remove(name)

    def _poll(
        self,
        look: Callable[[], T | None],
        complain: Callable[[], SaveFailed],
        *,
        timeout: float | None = None,
    ) -> T:
        """Look until there is something to see, ever less often."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        pause = 0.001
        while True:
            seen = look()
            if seen is not None:
                return seen
            if time.monotonic() > deadline:
                raise complain()
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)


_adopted = ""


def belong_to(job: str) -> None:
    """Let this process save as one of a job's: it writes for a rank that it is not itself."""
    global _adopted  # noqa: PLW0603 - a process belongs to one job
    _adopted = job


def job_name() -> str:
    """Name the job, so that the ranks of two jobs at one folder do not answer each other."""
    if _adopted:
        return _adopted
    variables = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
    known = [f"{name}={os.environ[name]}" for name in variables if name in os.environ]
    return hashlib.sha256(" ".join(known or [str(os.getppid())]).encode()).hexdigest()[:16]
