"""The entry of the `sloscope` command. It knows what Ctrl-C means before the first import that takes time."""

import signal
import sys


def run() -> None:
    try:
        from sloscope.cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # What is left is the interpreter's own end, which would print where it was.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    run()
