import json
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from reference_server.cost_fit import fit_held_out, samples_from_journal
from reference_server.cost_model import CostModel, Sample, StepShape
from reference_server.model_cli import app
from reference_server.work import attended_pairs
from sloscope import records
from sloscope.clock import SystemClock
from sloscope.errors import JournalError
from sloscope.journal import JournalWriter

TRUE = CostModel(1_000_000, 40_000, 60_000, 100, 10)
PAIR_FLOPS = 48


def step(number: int, shape: StepShape, duration_ns: int, **more: object) -> records.Record:
    """As an engine writes it whose attention takes 48 operations a pair."""
    start_ns = number * 10**9
    decode_kv = shape.kv_read_tokens if not shape.prefill_tokens else 0
    return records.make(
        "step", step_id=number, start_ns=start_ns, end_ns=start_ns + duration_ns, prefill_tokens=shape.prefill_tokens,
        decode_tokens=shape.decode_tokens, kv_read_tokens=shape.kv_read_tokens,
        prefill_attention_flops=float(PAIR_FLOPS * shape.prefill_pairs),
        decode_attention_flops=float(PAIR_FLOPS * decode_kv), **more,
    )  # fmt: skip


def shapes(n: int) -> list[StepShape]:
    """Prompts of 64 at 0, 64, … and batches of 1 to 8 decodes, by turns."""
    made = []
    for i in range(n):
        start, decodes = 64 * (i % 7), 1 + i % 8
        if i % 3 == 0:
            made.append(StepShape(64, 0, start + 64, attended_pairs(start, 64)))
        else:
            made.append(StepShape(0, decodes, decodes * (100 + 13 * (i % 11))))
    return made


def write(events: Path, lines: list[records.Record]) -> None:
    with JournalWriter(events, "engine", SystemClock(), orjson.dumps) as journal:
        for line in lines:
            journal.append(records.check(line))


def exact(n: int) -> list[records.Record]:
    return [step(i, shape, TRUE.step_ns(shape)) for i, shape in enumerate(shapes(n))]


def test_recorded_steps_come_back_with_their_pairs(tmp_path: Path) -> None:
    write(tmp_path, exact(30))
    found = samples_from_journal(tmp_path)
    assert found.samples == [Sample(shape, TRUE.step_ns(shape)) for shape in shapes(30)]
    assert (found.faults, found.unusable, found.bad_lines) == (0, 0, 0)


def test_faults_captures_old_records_and_damage_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = exact(10)
    lines[1]["fault"] = "stall=200ms"
    lines[4]["captured"] = True
    del lines[2]["kv_read_tokens"]
    lines[3]["end_ns"] = lines[3]["start_ns"]
    write(tmp_path, lines)
    (path,) = (tmp_path / "journal" / "engine").iterdir()
    with path.open("ab") as file:
        file.write(b"rubbish\n")
    found = samples_from_journal(tmp_path)
    assert len(found.samples) == 6
    assert (found.faults, found.captures, found.unusable, found.bad_lines) == (1, 1, 2, 1)


def test_steps_of_other_observers_are_not_read(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "client", SystemClock(), orjson.dumps) as journal:
        journal.append(exact(1)[0])
    assert samples_from_journal(tmp_path).samples == []


def test_the_held_out_fifth_is_not_fitted() -> None:
    samples = [Sample(shape, TRUE.step_ns(shape)) for shape in shapes(100)]
    # Steps 5, 10, … took twice as long: the fit does not know, and predicts half of them.
    odd = [Sample(s, 2 * ns) if i % 5 == 4 else Sample(s, ns) for i, (s, ns) in enumerate(samples)]
    done = fit_held_out(odd)
    assert (done.fitted, done.error.n) == (80, 20)
    assert (done.error.median, done.error.p90, done.error.bias) == pytest.approx((0.5, 0.5, -0.5), abs=1e-6)


def test_steps_that_show_no_prefill_are_refused() -> None:
    decodes = [Sample(StepShape(0, 1 + i % 4, 50 + i), 1_000_000) for i in range(50)]
    with pytest.raises(JournalError, match=r"step.prefill_tokens: above 0 in 0 of 40 steps to fit; accepted: at least"):
        fit_held_out(decodes)


def test_the_command_prints_and_writes_the_model(tmp_path: Path) -> None:
    write(tmp_path / "events", exact(200))
    out = tmp_path / "cost.json"
    done = CliRunner().invoke(app, ["fit", "--events", str(tmp_path / "events"), "--out", str(out), "--format", "json"])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["prefill_token_ns"]["value"] == pytest.approx(40_000)
    assert rows["prefill_token_ns"]["unit"] == "ns per prompt token"
    assert rows["held_out_steps"]["value"] == 40 and rows["fitted_steps"]["value"] == 160
    assert rows["held_out_p90_error"]["value"] < 1e-5
    assert CostModel.from_json(out.read_text()).kv_read_token_ns == pytest.approx(100)


def test_a_directory_that_is_not_there_is_wrong_use(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["fit", "--events", str(tmp_path / "none")])
    assert isinstance(done.exception, JournalError) and "no such directory" in str(done.exception)


def test_engines_that_differ_are_named(tmp_path: Path) -> None:
    engines = [
        records.make("engine", at_ns=i, clock_id="host:a:b", model=name, dtype="float32", device="cpu", threads=1)
        for i, name in enumerate(("builtin", "smollm2"))
    ]
    write(tmp_path, [*engines, *exact(100)])
    done = CliRunner().invoke(app, ["fit", "--events", str(tmp_path), "--format", "csv"])
    assert done.exit_code == 0
    assert "2 engines that differ in model, dtype, device or threads" in done.stderr
