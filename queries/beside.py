"""An events directory that cannot be written, read all the same: what is not compacted yet is compacted elsewhere."""

from pathlib import Path

from queries.compaction import compact
from queries.parts import live_files
from sloscope.journal import Manifest, journal_files


def compact_beside(events: Path, scratch: Path) -> None:
    """Makes of `scratch` the events directory that `events` would be after compaction; its files stand there as links.

    Ends owed by dead recorders are written into `scratch`, too. JournalError as of `compact`.
    """
    manifest = Manifest.load(events)
    journals = [str(path.relative_to(events)) for path in journal_files(events)]
    for name in (*live_files(manifest), *journals):
        link = scratch / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to((events / name).resolve())
    if manifest.generation > 0:
        manifest.save(scratch)
    compact(scratch)
