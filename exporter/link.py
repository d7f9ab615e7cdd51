"""The control plane's end of the socket over which the data plane hands its metrics."""

from __future__ import annotations

import asyncio
import contextlib

from sloscope.exposition import MetricStore

PATIENCE_S = 1.0
# Series without labels that this process counts itself; the data plane's copies of them stay at 0.
OWN = frozenset(
    {
        "sloscope_recovered_requests_total",
        "sloscope_reason_revisions_total",
        "sloscope_data_plane_restarts_total",
        "sloscope_snapshot_failures_total",
        "sloscope_sql_failures_total",
    }
)


class DataPlaneLink:
    """Keeps a store up to date with what the data plane counts.

    Values are cumulative. A data plane that was started anew, or an answer that got lost, makes the next one a full
    one, which replaces everything: the new process's series start at 0 then, as its lifetime does.
    """

    def __init__(self, path: str, store: MetricStore) -> None:
        self._path = path
        self._store = store
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._instance = b""

    async def poll(self, patience_s: float = PATIENCE_S) -> bool:
        """Takes what changed. False: no answer in time; the store keeps the latest."""
        try:
            async with asyncio.timeout(patience_s), self._lock:
                await self._exchange(full=not self._instance)
            return True
        except (OSError, asyncio.IncompleteReadError, ValueError):
            await self.close()
            return False

    async def _exchange(self, full: bool) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(self._path, limit=1 << 16)
        reader, writer = self._streams
        try:
            instance, is_full, payload = await self._ask(reader, writer, full)
            if instance != self._instance and not is_full:
                instance, is_full, payload = await self._ask(reader, writer, full=True)
        except BaseException:
            # Half an answer: what it said is lost, and the connection out of step.
            self._instance = b""
            self._streams = None
            writer.close()
            raise
        self._store.absorb(payload, but=OWN)
        self._instance = instance

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, full: bool
    ) -> tuple[bytes, bool, bytes]:
        writer.write(b"full\n" if full else b"changes\n")
        await writer.drain()
        instance, is_full = (await reader.readline()).split()
        pieces = []
        while length := int(await reader.readline()):
            pieces.append(await reader.readexactly(length))
        return instance, is_full == b"1", b"".join(pieces)

    async def close(self) -> None:
        streams, self._streams = self._streams, None
        self._instance = b""
        if streams is not None:
            streams[1].close()
            with contextlib.suppress(OSError):
                await streams[1].wait_closed()
