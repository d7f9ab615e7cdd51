"""The reference pages under docs/reference, each made from the one place where its facts stand.

python -m queries.reference            writes them
python -m queries.reference --check    exits 1 and names each page that is not what its source says
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from queries import tables
from queries.header import Header
from queries.runner import base_views, list_questions, question
from sloscope import catalogue, errors, foreign_names, records
from sloscope.cli import COMMANDS
from sloscope.journal import write_atomically
from sloscope.output import message

ROOT = Path(__file__).parent.parent
FOLDER = "docs/reference"


def pages() -> dict[str, str]:
    """File name → text."""
    return {
        "metrics.md": catalogue.markdown(),
        "upstream-engines.md": foreign_names.markdown(),
        "questions.md": questions_page(),
        "records.md": records_page(),
        "tables.md": tables_page(),
        "commands.md": commands_page(),
    }


def differing(root: Path = ROOT) -> list[str]:
    """The pages, relative to `root`, that are missing or not what their source says."""
    wrong = []
    for name, text in pages().items():
        path = root / FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            wrong.append(f"{FOLDER}/{name}")
    return wrong


def write(root: Path = ROOT) -> list[str]:
    """Writes the pages that differ; their names."""
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    made, wrong = pages(), differing(root)
    for name in wrong:
        write_atomically(root / name, made[Path(name).name].encode())
    return wrong


# --- Markdown ------------------------------------------------------------------------------------------------


def _page(title: str, source: str, lead: str, body: Iterable[str]) -> str:
    note = f"Generated from {source} by `make generate`; do not edit."
    return "\n".join([f"# {title}", "", note, "", lead, "", *body]).rstrip() + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") or "-" for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows), ""]


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


# --- questions -----------------------------------------------------------------------------------------------


def questions_page() -> str:
    listed = list_questions()
    body = _table(
        ("question", "topic", "asks"),
        [(f"[`{row['name']}`](#{row['name']})", row["topic"], row["question"]) for row in listed],
    )
    topic = ""
    for row in listed:
        header = question(row["name"])
        if header.topic != topic:
            topic = header.topic
            body += [f"## Topic: {topic}", ""]
        body += _question(header)
    body += [
        "## Base views",
        "",
        "What the questions select from. `sloscope sql` can select from them too.",
        "",
    ]
    for view in sorted(base_views(), key=lambda view: view.name):
        body += [f"### {view.name}", "", f"{view.view}. One row: {_grain(view)}.", ""]
        body += [f"Reads: {_code(view.inputs)}.", ""] if view.inputs else []
        body += [f"Rules: {view.rules}", ""] if view.rules else []
        body += [f"Source: {view.source}", ""] if view.source else []
    return _page(
        "Questions",
        "the headers of `queries/*/*.sql`",
        "Each is asked with `sloscope query NAME --events DIR`. A parameter is given as `--param NAME=VALUE`.",
        body,
    )


def _grain(header: Header) -> str:
    return header.grain.removeprefix("one row per ").removeprefix("one row").strip(" :,") or "the only one"


def _question(header: Header) -> list[str]:
    body = [f"### {header.name}", "", header.question, "", f"One row: {_grain(header)}.", ""]
    body += [f"Reads: {_code(header.inputs)}.", ""] if header.inputs else []
    if header.params:
        body += _table(
            ("parameter", "type", "unit or accepted", "default", "remark"),
            [(f"`{p.name}`", p.type, p.unit + p.from_minimum, p.default, p.remark) for p in header.params.values()],
        )
    body += _table(
        ("output", "type", "unit", "remark"), [(f"`{o.name}`", o.type, o.unit, o.remark) for o in header.outputs]
    )
    body += [f"Rules: {header.rules}", ""] if header.rules else []
    body += [f"Source: {header.source}", ""] if header.source else []
    return body


# --- records and tables --------------------------------------------------------------------------------------

_KINDS = {
    "clock": "A monotonic and a wall reading taken together: it places the stamps that follow on the wall.",
    "begin": "A request began at an observer.",
    "chunks": "A batch of receipts of output events.",
    "emit": "The engine's stamps of the same events.",
    "end": "How the request ended at this observer.",
    "late": "A fact that came after the end; compaction merges it.",
    "state": "A state of a request in the engine changed.",
    "step": "One iteration of the engine.",
    "engine": "What an engine process is and how it is set: at its start and, whole again, when any of it changes.",
    "decision": "One decision of admission.",
}


def records_page() -> str:
    assert _KINDS.keys() == records.SCHEMA.keys(), "every kind of record has its line"
    body: list[str] = []
    for kind, fields in records.SCHEMA.items():
        body += [f"## {kind}", "", _KINDS[kind], ""]
        rows = [
            (f"`{f.name}`", f.type, "yes" if f.required else "", ", ".join(a or "(empty)" for a in f.accepted), f.doc)
            for f in fields
        ]
        body += _table(("field", "type", "required", "accepted", "meaning"), rows)
    body += ["## Words in the fields", ""]
    outcomes = {
        f"outcome `{outcome}`": ", ".join(r or "(empty)" for r in reasons)
        for outcome, reasons in records.OUTCOMES.items()
    }
    words = {
        "observer": ", ".join(records.OBSERVERS),
        "role": ", ".join(records.ROLES),
        "type in `chunks`": ", ".join(f"{place} {name}" for place, name in enumerate(records.OUTPUT_TYPES)),
        "token_source": ", ".join(records.TOKEN_SOURCES),
        "state": ", ".join(records.STATES),
        "limits": ", ".join(records.LIMIT_FIELDS),
        **outcomes,
    }
    body += _table(("word", "accepted"), list(words.items()))
    return _page(
        "Journal records",
        "`sloscope/records.py`",
        f"One JSON object a line, with `v` (written: {records.VERSION}; readable: "
        f"{', '.join(str(v) for v in records.READABLE_VERSIONS)}) and `kind`. A field that is not known is left out. "
        "`_ns` is an integer of nanoseconds. A field that may be left out joins without a new version: what was "
        "written before it stays readable, and lacks it.",
        body,
    )


_NO_BRACES = str.maketrans("", "", "{}")


def tables_page() -> str:
    body: list[str] = []
    for name, columns in tables.TABLES.items():
        body += [f"## {name}", ""]
        shown = {c.name: f"`{c.derived.translate(_NO_BRACES)}`" if c.derived else "" for c in columns}
        rows = [(f"`{c.name}`", c.type, c.doc, shown[c.name]) for c in columns]
        if any(c.derived for c in columns):
            body += _table(("column", "type", "meaning", "computed when read"), rows)
        else:
            body += _table(("column", "type", "meaning"), [row[:3] for row in rows])
    return _page(
        "Tables",
        "`queries/tables.py`",
        "What compaction writes as Parquet, and `sloscope sql` reads as views. A value that is not known is NULL.",
        body,
    )


# --- commands ------------------------------------------------------------------------------------------------


def commands_page() -> str:
    body = _table(("command", "does"), [(f"[`sloscope {n}`](#sloscope-{n})", c.help) for n, c in COMMANDS.items()])
    for name, command in COMMANDS.items():
        for path, parsed in _walk(name, load_command(name)):
            level = "##" if path == name else "###"
            body += [f"{level} sloscope {path}", ""]
            if path == name and command.extra:
                body += [f"Needs the extra `{command.extra}`.", ""]
            body += _command(parsed)
    body += ["## Exit codes and errors", ""]
    body += ["0 done; 1 the answer is no; 2 wrong use or input, with one line on stderr. The errors behind that line:"]
    body += ["", "```text", *_error_tree(), "```"]
    return _page(
        "Commands",
        "the command line itself",
        "`-h` or `--help` behind any of them prints the same. An address without a host means 127.0.0.1.",
        body,
    )


def load_command(name: str) -> Any:
    """The parsed command behind `sloscope NAME`, as Typer builds it."""
    module, _, attribute = COMMANDS[name].target.partition(":")
    return typer.main.get_command(getattr(importlib.import_module(module), attribute))


def _walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _walk(f"{path} {name}", inner)


def _command(command: Any) -> list[str]:
    body: list[str] = []
    for paragraph in (command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):  # lines that are meant to stand as they are: examples
            body += ["```text", *(line.rstrip() for line in paragraph.splitlines()[1:]), "```", ""]
        else:
            body += [" ".join(paragraph.split()), ""]
    rows = []
    for param in command.params:
        name = ", ".join(f"`{opt}`" for opt in (*param.opts, *param.secondary_opts))
        if param.param_type_name == "argument":
            name = f"`{(param.metavar or param.name).upper()}`"
        if any(opt.endswith("completion") for opt in param.opts):
            continue  # the shell's, not ours
        rows.append((name, _default(param), (param.help or "") + (" Repeatable." if param.multiple else "")))
    return body + (_table(("argument or option", "default", "says"), rows) if rows else [])


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if param.default is None or param.default in ("", [], False) or callable(param.default):
        return ""
    return f"`{param.default}`"


def _error_tree() -> list[str]:
    lines = (errors.__doc__ or "").splitlines()
    return [line.strip("\n")[4:] for line in lines if line.startswith("    ")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m queries.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page differs")
    if parser.parse_args(arguments).check:
        wrong = differing()
        for name in wrong:
            message(f"{name} differs from its source; make generate writes it")
        return 1 if wrong else 0
    for name in write():
        message(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
