"""The answers of a batch job: the file that grows, and the ids that were seen."""

import json
import os
import re
import sqlite3
import time
from pathlib import Path

import xxhash

from nanovllm.files.system import lock_file
from nanovllm.jobs.answer_lines import Answer
from nanovllm.jobs.fingerprint import Job
from nanovllm.serving.openai.json_lines import to_json

READ_BYTES = 1_000_000
BINARY = getattr(os, "O_BINARY", 0)  # Windows would write \\r\\n
SYNC_EVERY_S = 1.0  # at most this much work is lost to a power cut
SUCCEEDED, FAILED = 1, 2

# -- custom ids ------------------------------------------------------------------------------------------------------


class CustomIds:
    """The ids seen so far, in a temporary file that SQLite keeps out of memory."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)  # "": on disk, and gone with the connection
        self._db.executescript(
            "PRAGMA journal_mode=OFF; CREATE TABLE seen (id BLOB PRIMARY KEY, line) WITHOUT ROWID; BEGIN"
        )

    def claim(self, custom_id: str, line_number: int) -> None:
        """Raises ValueError if an earlier line has it."""
        key = custom_id.encode("utf-8", "surrogatepass")
        if self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, line_number)).rowcount == 0:
            [first] = self._db.execute("SELECT line FROM seen WHERE id = ?", (key,)).fetchone()
            raise ValueError(f"custom_id {custom_id!r:.80} is that of line {first} already")


# -- the output -------------------------------------------------------------------------------------------------------


class OutputFile:
    """Records of one job, one a line. Opened by one process at a time.

    Raises ValueError, with the file as it was, if it holds anything else than whole records of this job and the
    beginning of one more; and, whenever it notices, if somebody else has written to the file, cut or removed it.

    status          for each input line: 0, SUCCEEDED or FAILED
    num_answered    lines that have a record
    """

    def __init__(self, path: Path, job: Job) -> None:
        self.path, self.job = path, job
        self.status, self.num_answered = bytearray(job.last_line + 1), 0
        self._digest = xxhash.xxh3_64()  # of the whole file
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o644)
        try:
            self._lock()
            self._size = self._scan()
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise
        self._synced_size, self._synced_at = self._size, time.monotonic()

    def append(self, answers: list[Answer]) -> None:
        """Write records, all or none. Raises OSError."""
        lines = [to_json(answer.record(f"{self.job.id_prefix}{answer.line_number}")) + "\n" for answer in answers]
        data = "".join(lines).encode()
        self._check_size()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            hint = f"{error.strerror}. The records in it are whole: make room and run the same command again"
            raise OSError(error.errno, hint, str(self.path)) from error
        self._size += len(data)
        self._digest.update(data)
        if self._size > self._synced_size and time.monotonic() - self._synced_at > SYNC_EVERY_S:
            os.fsync(self._fd)
            self._synced_size, self._synced_at = self._size, time.monotonic()
        for answer in answers:
            self._note(answer.line_number, answer.error is not None)

    def close(self) -> None:
        """Raises ValueError or OSError if the file does not hold what was written."""
        try:
            os.fsync(self._fd)
            self._check_size()
            found = xxhash.xxh3_64()
            os.lseek(self._fd, 0, os.SEEK_SET)
            while data := os.read(self._fd, READ_BYTES):
                found.update(data)
            if found.digest() != self._digest.digest():
                raise ValueError(f"{self.path} was written to by somebody else while the job ran")
        finally:
            os.close(self._fd)

    def _check_size(self) -> None:
        ours = os.fstat(self._fd)
        try:
            is_there = os.path.samestat(ours, os.stat(self.path))
        except OSError:
            is_there = False
        if not is_there or ours.st_size != self._size:
            what = f"has {ours.st_size:,} bytes instead of {self._size:,}" if is_there else "was removed or replaced"
            raise ValueError(f"{self.path} {what} while the job ran; run the same command again to answer what is lost")

    def _lock(self) -> None:
        try:
            lock_file(self._fd, wait=False)
        except BlockingIOError as error:
            raise ValueError(f"{self.path} is being written by another run-batch") from error

    def _scan(self) -> int:
        """Note what is done. Returns the size of the whole records."""
        size, start = 0, f'{{"id": "{self.job.id_prefix}'.encode()
        with open(os.dup(self._fd), "rb") as file:
            for number, line in enumerate(file, start=1):
                # Zeros, which no JSON has: a file system had made room and no time to fill it.
                written, zeros, _ = line.partition(b"\0")
                whole = line.endswith(b"\n") and not zeros
                if (
                    not whole
                    and start.startswith(written[: len(start)])
                    and (written or size or not line.strip(b"\0\n"))
                ):
                    break
                self._take(number, line)
                self._digest.update(line)
                size += len(line)
        return size

    def _take(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            found = re.fullmatch(r"batch_req_(\w{16})_(\w{16})_(\d+)", record["id"])
            is_error = record["error"] is not None
        except (ValueError, LookupError, TypeError, RecursionError):
            found = None
        if found is None:
            raise ValueError(f"line {number} of {self.path} was not written by run-batch; choose another output file")
        same_input, same_model = found[1] == self.job.input_hash, found[2] == self.job.model_hash
        if not (same_input and same_model):
            options = "--dtype, --seed, --quantization or --lora-modules"
            what = f"another model, or other {options}" if same_input else "another input"
            raise ValueError(
                f"{self.path} holds answers to {what}: give what it was begun with to continue it, or choose another "
                "output file"
            )
        line_number = int(found[3])
        if line_number >= len(self.status) or self.status[line_number]:
            raise ValueError(f"line {number} of {self.path} answers line {line_number} once more; was it edited?")
        self._note(line_number, is_error)

    def _note(self, line_number: int, is_error: bool) -> None:
        self.status[line_number] = FAILED if is_error else SUCCEEDED
        self.num_answered += 1
