"""The docs say what the code does: everything has its place in them, and what they show can be run."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exporter.receipts import _FIELDS, OwnJournals, ReceiptRate, Receipts
from queries import reference
from queries.runner import question, questions
from reference_server.request import TRANSITIONS
from sloscope import catalogue, contract, errors, records
from sloscope.cli import COMMANDS
from sloscope.clock import FakeClock
from sloscope.exposition import MetricStore
from sloscope.journal import JournalWriter
from sloscope.units import parse_window
from tests.contract import markdown

ROOT = markdown.ROOT
SHELL = markdown.blocks("bash")
HEADERS = (
    *contract.LIMIT_HEADERS, contract.CLASS_HEADER, "x-sloscope-request-id", "x-sloscope-retry-of", "x-request-id",
    "x-slo-tenant", "x-sloscope-stop-after", "x-sloscope-fault",
)  # fmt: skip


def doc(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


# --- everything has its place ---------------------------------------------------------------------------------


def test_generated_pages_are_what_their_sources_say() -> None:
    assert reference.differing() == [], "make generate"


def test_check_names_a_page_that_differs_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reference.write(tmp_path)
    assert reference.differing(tmp_path) == []
    page = tmp_path / reference.FOLDER / "records.md"
    page.write_text(page.read_text() + "one line more\n")
    assert reference.differing(tmp_path) == ["docs/reference/records.md"]
    monkeypatch.setattr(reference, "differing", lambda: ["docs/reference/records.md"])
    assert reference.main(["--check"]) == 1
    assert "docs/reference/records.md" in capsys.readouterr().err


def test_every_metric_question_and_record_field_is_documented() -> None:
    metrics, asked, kinds = (doc(f"reference/{name}.md") for name in ("metrics", "questions", "records"))
    assert [metric.name for metric in catalogue.METRICS if f"`{metric.name}`" not in metrics] == []
    assert [name for name in questions() if f"\n### {name}\n" not in asked] == []
    for kind, fields in records.SCHEMA.items():
        section = kinds.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
        assert [field.name for field in fields if f"| `{field.name}` |" not in section] == [], kind


def test_every_command_and_option_is_documented() -> None:
    page = doc("reference/commands.md")
    for name in COMMANDS:
        for path, command in reference._walk(name, reference.load_command(name)):
            section = re.split(r"\n###? ", page.partition(f" sloscope {path}\n")[2])[0]
            options = [opt for param in command.params for opt in param.opts if opt.startswith("--")]
            missing = [opt for opt in options if f"`{opt}`" not in section and not opt.endswith("-completion")]
            assert section and missing == [], path


def test_every_error_class_outcome_and_reason_stands_in_the_concepts() -> None:
    text = doc("concepts.md")
    classes = [cls.__name__ for cls in [errors.SloscopeError, *errors.SloscopeError.__subclasses__()]]
    reasons = [reason for group in records.OUTCOMES.values() for reason in group if reason]
    ours = [name for name in classes if hasattr(errors, name)]
    assert [word for word in (*ours, *records.OUTCOMES, *reasons) if f"`{word}`" not in text] == []


def test_every_limit_key_and_preset_of_a_contract_is_documented() -> None:
    text = markdown.all_text()
    words = (*contract.LIMIT_NAMES, *contract.PRESETS, *contract._BUDGET_LINKS, *contract._SHORTHAND)
    assert [word for word in words if word not in text] == []


def test_every_header_and_route_is_documented() -> None:
    text = doc("sidecar.md") + doc("reference-server.md")
    assert [header for header in HEADERS if f"`{header}" not in text] == []
    for source in ("reference_server/app.py", "exporter/control_plane.py"):
        routes = re.findall(r'@app\.(?:get|post)\("([^"]+)"', (ROOT / source).read_text())
        assert routes and [route for route in routes if f"{route}`" not in text] == [], source


def test_the_states_of_the_reference_server_are_listed_with_what_may_follow() -> None:
    text = doc("reference-server.md")
    for state, following in TRANSITIONS.items():
        if state is not None and following:
            row = next(line for line in text.splitlines() if line.startswith(f"| {state} |"))
            assert set(row.split("|")[3].replace(" ", "").split(",")) == {str(s) for s in following}, state


def test_the_reference_server_says_who_owes_what_as_a_sheet_does() -> None:
    section = doc("reference-server.md").partition("\n## Who owes what\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "→" in line]
    sheet = contract.sheet(contract.preset("exercise"))  # its observer is the client
    assert [(row[0], row[2], row[3]) for row in rows] == [(row.obligation, row.owner, row.policy) for row in sheet]
    shown = [re.findall(r"sloscope_\w+", row[4].replace("…", "client")) for row in rows]
    assert shown == [re.findall(r"sloscope_\w+", row.exposed_by) for row in sheet]


def test_the_policies_of_a_sheet_are_flags_of_the_server() -> None:
    flags = {
        flag for row in contract.sheet(contract.preset("exercise")) for flag in re.findall(r"--[a-z-]+", row.policy)
    }
    known = {opt for param in reference.load_command("serve").params for opt in param.opts}
    assert flags and flags <= known


def test_the_table_of_receipts_lists_every_field() -> None:
    table = doc("sidecar.md").partition("## Receipts of real clients")[2].partition("\n## ")[0]
    # `observer` belongs to a late reason and has one useful value, its default.
    assert [field for field in _FIELDS if f"`{field}`" not in table and field != "observer"] == []


def test_no_metric_in_the_docs_is_unknown_to_the_catalogue() -> None:
    known = {metric.name for metric in catalogue.METRICS}
    families = {metric.name for metric in catalogue.METRICS if metric.kind == "histogram"}
    known |= {f"{name}{suffix}" for name in families for suffix in ("_bucket", "_sum", "_count")}
    named = set(re.findall(r"\bsloscope_[a-z0-9_]+[a-z0-9]\b", markdown.all_text()))
    assert sorted(name for name in named - known if not any(other.startswith(f"{name}_") for other in known)) == []


# --- what is shown works --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", markdown.files(), ids=markdown.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in markdown.links(path):
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in markdown.anchors(there), f"{target}: no such heading"


def parse(words: list[str]) -> None:
    """Parses a command line as the command itself would, without running it."""
    command: Any = reference.load_command(words[0])
    path, rest = words[0], words[1:]
    while hasattr(command, "commands"):
        assert rest and rest[0] in command.commands, f"{path}: {rest[:1]} is no subcommand"
        command, path, rest = command.commands[rest[0]], f"{path} {rest[0]}", rest[1:]
    given = command.make_context(path, rest).params
    if path == "query" and given["name"]:
        question(given["name"]).values(dict(item.split("=", 1) for item in given["param"]))
    if window := given.get("window"):
        parse_window(window.replace("$SINCE", "2026-01-01T00:00:00Z"), "--window")


def shown_commands(script: str) -> list[list[str]]:
    return [words[1:] for words in markdown.commands(script) if words[0].rpartition("/")[2] == "sloscope"]


def test_every_sloscope_command_shown_is_accepted_by_the_command_line() -> None:
    shown = [(block.file, words) for block in SHELL for words in shown_commands(block.text)]
    assert {words[0] for _, words in shown} >= {"lab", "contract", "serve", "sidecar", "replay", "query", "sql"}
    for file, words in shown:
        try:
            parse(words)
        except Exception as error:
            pytest.fail(f"{file}: sloscope {' '.join(words)}: {error}")


@pytest.mark.parametrize("line", ["lab --relaxed itl_max=80ms", "query goodpt", "query quantiles --param metrik=ttft"])
def test_a_command_that_does_not_exist_would_be_found(line: str) -> None:
    with pytest.raises(Exception, match=r"relaxed|goodpt|metrik"):
        parse(line.split())


def test_questions_named_in_running_text_exist() -> None:
    named = set(re.findall(r"`sloscope query ([a-z_]+)", markdown.all_text()))
    assert len(named) >= 5
    assert sorted(named - set(questions())) == []


def test_every_contract_shown_is_a_contract() -> None:
    shown = [block for block in markdown.blocks("toml") if "[classes." in block.text]
    assert {block.file for block in shown} >= {"docs/concepts.md"}
    for block in shown:
        assert contract.parse(block.text, block.file).classes


def test_python_shown_compiles() -> None:
    shown = markdown.blocks("python")
    assert {block.file for block in shown} >= {"docs/client.md"}
    for block in shown:
        compile(block.text, block.file, "exec")


def test_receipts_shown_are_taken(tmp_path: Path) -> None:
    promised, clock = contract.preset("exercise"), FakeClock()
    rate = ReceiptRate(clock, per_s=1000, burst=20_000)
    store = MetricStore("sidecar", promised)
    receipts = Receipts(
        promised, store, lambda: JournalWriter(tmp_path, "client", clock), clock, rate, OwnJournals(tmp_path)
    )
    bodies = re.findall(r"v1/receipts .*?-d '(.*?)'", doc("sidecar.md"), re.S)
    assert len(bodies) == 2, "a whole receipt and a late reason"
    for body in bodies:
        receipts.take(json.loads(body))
    receipts.close()


def test_the_lab_shown_is_what_the_lab_prints() -> None:
    done = subprocess.run([sys.executable, "-m", "sloscope", "lab"], capture_output=True, text=True, check=True)
    printed = {line.rstrip() for line in (done.stdout + done.stderr).splitlines()}
    tables = {block.file: block.text for block in reversed(markdown.blocks("text")) if "│ A  " in block.text}
    assert "docs/tutorial.md" in tables
    for file, text in tables.items():
        assert [line for line in text.splitlines() if line.rstrip() not in printed] == [], file
