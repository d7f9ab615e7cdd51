"""A relay that can hold responses back, as a buffering proxy does: `python -m sloscope.demo.hop`.

Bytes towards the server pass at once. Bytes towards the client pass at once too, until `hold MS` is written to
standard
input; then each connection's bytes are kept until they are MS old or the response has ended, and leave together.
`pass` ends it.
"""

import argparse
import asyncio
import sys

BLOCK = 1 << 16
MAX_HELD = 1 << 20  # bytes kept per connection before they leave anyway


class Hop:
    """One listening socket, one upstream. `hold_s` may change while connections are open."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.hold_s = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(*self.upstream)
        except OSError:
            writer.close()
            return
        towards_server = asyncio.create_task(self._pass(reader, up_writer))
        towards_client = asyncio.create_task(self._hold(up_reader, writer))
        # Either side leaving ends both, so that a disconnect is seen through the hop.
        _, pending = await asyncio.wait({towards_server, towards_client}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(towards_server, towards_client, return_exceptions=True)
        for side in (writer, up_writer):
            side.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(BLOCK):
            writer.write(data)
            await writer.drain()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held = bytearray()
        loop = asyncio.get_running_loop()
        deadline = 0.0
        pending: asyncio.Task[bytes] | None = None
        try:
            while True:
                pending = pending or asyncio.create_task(reader.read(BLOCK))
                timeout = max(0.0, deadline - loop.time()) if held else None
                done, _ = await asyncio.wait({pending}, timeout=timeout)
                if done:
                    data = pending.result()
                    pending = None
                    if not data:
                        break
                    if not held:
                        deadline = loop.time() + self.hold_s
                    held += data
                    if data.endswith(b"0\r\n\r\n"):
                        deadline = 0.0  # the last chunk of a chunked response: nothing more to wait for
                if held and (loop.time() >= deadline or len(held) >= MAX_HELD or not self.hold_s):
                    writer.write(bytes(held))
                    held.clear()
                    await writer.drain()
        finally:
            if pending is not None:
                pending.cancel()
            if held and not writer.is_closing():
                writer.write(bytes(held))

    def command(self, line: str) -> None:
        """`hold 400` or `pass`; anything else is ignored."""
        words = line.split()
        if words == ["pass"]:
            self.hold_s = 0.0
        elif len(words) == 2 and words[0] == "hold" and words[1].isdigit():
            self.hold_s = int(words[1]) / 1000


async def run(host: str, port: int, upstream: tuple[str, int]) -> None:
    hop = Hop(upstream)
    server = await asyncio.start_server(hop.serve, host, port)
    address = server.sockets[0].getsockname()
    sys.stderr.write(f"hop on {address[0]}:{address[1]}\n")
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        hop.command(line.decode())
    server.close()  # standard input closed: whoever started the hop is gone


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sloscope.demo.hop", description=__doc__)
    parser.add_argument("--upstream", required=True, metavar="HOST:PORT")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    arguments = parser.parse_args()
    host, _, port = arguments.listen.rpartition(":")
    up_host, _, up_port = arguments.upstream.rpartition(":")
    try:
        asyncio.run(run(host, int(port), (up_host, int(up_port))))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
