"""What waits for a disk that does not answer."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sloscope.client import receipt_writer
from sloscope.client.receipt_log import ReceiptLog
from sloscope.client.receipt_writer import Writer, WriterThread
from sloscope.clock import FakeClock
from sloscope.ids import new_request_id


class Gate:
    """Every write waits until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._write = Writer.write
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        self.written: list[int] = []  # lines of each write
        monkeypatch.setattr(Writer, "write", lambda writer, lines: self._pass(writer, lines))

    def _pass(self, writer: Writer, lines: list[bytes]) -> None:
        self.is_reached.set()
        assert self.is_open.wait(5)
        self.written.append(len(lines))
        self._write(writer, lines)


def test_it_is_bounded_in_bytes_and_the_rest_is_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipt_writer, "_MAX_WAITING_BYTES", 1000)
    gate, writer = Gate(monkeypatch), Writer(tmp_path, FakeClock())
    thread = WriterThread(writer, lambda: True)
    thread.put([b'"%s"' % (b"x" * 398)])
    assert gate.is_reached.wait(5)
    refused = threading.Lock()
    refused.acquire()
    thread.put([b'"%s"' % (b"x" * 398)])  # 800 bytes
    thread.put([b'"%s"' % (b"x" * 98)] * 3, refused)  # would be 1,100
    thread.put([b'"%s"' % (b"x" * 98)] * 2)  # 1,000
    assert not refused.locked()  # who waits for lines that are lost goes on
    assert (writer.lost, writer.last_error) == (3, "the disk does not follow")
    gate.is_open.set()
    thread.finish()
    assert thread.join()
    # What had waited went in one write.
    assert gate.written == [1, 3] and writer.lost == 3


def test_lines_above_the_bound_are_written_where_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipt_writer, "_MAX_WAITING_BYTES", 10)
    writer = Writer(tmp_path, FakeClock())
    thread = WriterThread(writer, lambda: True)
    thread.put([b'"%s"' % (b"x" * 98)])
    thread.finish()
    assert thread.join() and writer.lost == 0


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_label_that_is_no_json_costs_its_record_and_nothing_else(tmp_path: Path, in_thread: bool) -> None:
    log = ReceiptLog(tmp_path, FakeClock())
    if in_thread:
        log.start_thread()
    recorder = log.open(new_request_id(), 0, streaming=True, labels={"mine": object()})
    assert log.lost == 1 and log.last_error.startswith("TypeError: ")
    recorder.end(1, transport="connect_error")
    log.close()
    assert log.lost == 1
