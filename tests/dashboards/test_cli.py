"""`sloscope dashboards` and `sloscope rules` as a person runs them."""

import json
from pathlib import Path

from tests.command import sloscope as run


def test_check_passes_on_what_build_wrote_and_names_the_file_that_was_edited(tmp_path: Path) -> None:
    built = run("dashboards", "build", "--out", str(tmp_path), "--format", "json")
    assert built.returncode == 0, built.stderr
    files = [Path(row["file"]) for row in json.loads(built.stdout)]
    assert [path.name for path in files] == ["overview.json", "engine-against-receipt.json"]
    assert run("dashboards", "check", "--out", str(tmp_path)).returncode == 0

    files[0].write_text(files[0].read_text().replace("Goodput", "Throughput", 1))
    checked = run("dashboards", "check", "--out", str(tmp_path))
    assert checked.returncode == 1
    assert f"{files[0]}: differs from what would be built" in checked.stderr
    assert str(files[1]) not in checked.stderr


def test_rules_of_an_own_contract_are_built_and_checked_where_they_are_told_to_go(tmp_path: Path) -> None:
    contract = tmp_path / "c.toml"
    contract.write_text('version = 1\nobserver = "sidecar"\n[classes.chat]\nttft = "2s"\nobjective = 0.95\n')
    out = tmp_path / "out"
    built = run("rules", "build", "--contract", str(contract), "--out", str(out), "--runbooks", "https://wiki.test/r")
    assert built.returncode == 0, built.stderr
    text = (out / "rules/sloscope.rules.yaml").read_text()
    assert '{class="chat"}) / 0.05' in text
    assert "runbook_url: https://wiki.test/r#sloscopeerrorbudgetfastburn" in text
    # The same command line checks; the default contract makes other rules.
    same = ("--contract", str(contract), "--out", str(out), "--runbooks", "https://wiki.test/r")
    assert run("rules", "check", *same).returncode == 0
    assert run("rules", "check", "--out", str(out)).returncode == 1


def test_an_own_contract_does_not_replace_the_rules_that_ship(tmp_path: Path) -> None:
    contract = tmp_path / "c.toml"
    contract.write_text('version = 1\n[classes.chat]\nttft = "2s"\n')
    refused = run("rules", "build", "--contract", str(contract))
    assert refused.returncode == 2
    assert refused.stderr == "error: --out: is missing; accepted: a folder for the rules of --contract\n"


def test_a_contract_that_does_not_parse_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    contract = tmp_path / "c.toml"
    contract.write_text('version = 1\n[classes.chat]\nttft = "soon"\n')
    refused = run("rules", "build", "--contract", str(contract), "--out", str(tmp_path / "out"))
    assert refused.returncode == 2
    assert "classes.chat.ttft: 'soon' is not accepted" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = run("dashboards", "build", "--out", str(tmp_path / "file"))
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --out: ")
    assert refused.stderr.count("\n") == 1


def test_a_format_that_is_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    refused = run("dashboards", "build", "--out", str(tmp_path / "out"), "--format", "xml")
    assert refused.returncode == 2
    assert not (tmp_path / "out").exists()
