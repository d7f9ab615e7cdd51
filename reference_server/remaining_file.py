"""The length table as a file that is replaced while serving."""

from pathlib import Path
from stat import S_ISREG

from reference_server.remaining import Lengths, LengthTable
from sloscope.errors import ConfigError
from sloscope.units import NS_PER_S

CHECK_NS = NS_PER_S
_Signature = tuple[int, int, int]


class LengthFile:
    """Reads the file into `lengths` now, where a bad one is a ConfigError, and again whenever it was replaced.

    Write a new one beside it and rename it over the old one. What cannot be read later is refused and the last good
    table stays in use; `problem` says why until a good one comes.
    """

    def __init__(self, path: Path, lengths: Lengths) -> None:
        self.path = path
        self.lengths = lengths
        self.problem: str | None = None
        self._checked_ns: int | None = None
        try:
            signature = self._signature()
            lengths.table = self._read()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); accepted: a length table") from None
        self._seen: _Signature | None = signature
        self.written_at_ns = signature[0]  # wall time of the table in use

    def refresh(self, now_ns: int) -> bool:
        """Looks at most once a second; True when the table or the problem is another one now."""
        if self._checked_ns is not None and now_ns - self._checked_ns < CHECK_NS:
            return False
        self._checked_ns = now_ns
        before = self.problem
        try:
            signature = self._signature()
            if signature == self._seen:
                return False
            self._seen = signature
            self.lengths.table = self._read()
            self.written_at_ns = signature[0]
        except OSError as error:
            self._seen = None
            self.problem = f"{self.path}: cannot be read ({error.strerror}); the last good table stays in use"
            return self.problem != before
        except ConfigError as error:
            self.problem = f"{error}; the last good table stays in use"
            return self.problem != before
        self.problem = None
        return True

    def _signature(self) -> _Signature:
        stat = self.path.stat()
        if not S_ISREG(stat.st_mode):  # of a pipe a read may never end
            raise ConfigError(f"{self.path}: is no file; accepted: a length table")
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> LengthTable:
        try:
            text = self.path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{self.path}: is not UTF-8; accepted: a length table") from None
        return LengthTable.parse(text, field=str(self.path))
