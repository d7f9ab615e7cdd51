"""A server that is not ours behind the sidecar: a real trace and the real `openai` package, receipts to goodput.

`transformers serve` streams without `[DONE]`, sends its role chunk before it computes anything, states usage on the
chunk with the finish reason only, generates one answer at a time, refuses unknown fields with 422 and reports some
errors inside a 200 stream. It stamps nothing for us: what only an engine knows must stay NULL or suspected.
"""

import asyncio
import json
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sloscope.client import AsyncReceiptTransport, ReceiptTransport
from sloscope.demo.processes import Stage, ask
from sloscope.errors import ConfigError
from sloscope.journal import Tail, journal_files, read_journal
from sloscope.units import format_instant
from tests.end_to_end.foreign_server import start_transformers
from tests.end_to_end.support import start_sidecar, until
from tests.field_data import field_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

# Wide enough that a busy machine breaks none of them: then a request qualifies exactly when it completed.
WIDE = """
version = 1
observer = "client"
default_class = "chat"
[classes.chat]
ttft = "90s"
itl_max = "60s"
[classes.whole]
streaming = "optional"
e2e = "120s"
"""
REPLAYED = 8
PAUSE_S = 1.5  # how long one consumer does not read
# What may be said of a late output without the engine's stamps.
AT_MOST = {"suspected_decoder_stall", "suspected_buffered_delivery", "unknown"}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Tell me a long story about the sea."}]


@dataclass(frozen=True)
class Run:
    """What one run left behind. Rows of the table `requests` by the name that the caller gave each call."""

    events: Path
    contract: Path
    calls: dict[str, dict[str, Any]]
    replayed: list[dict[str, Any]]
    replay_report: dict[str, Any]
    metrics: str
    calls_window: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [*self.calls.values(), *self.replayed]

    def query(self, name: str, *options: str, goodput: str = "") -> list[dict[str, Any]]:
        limits = ("--goodput", goodput) if goodput else ("--contract", str(self.contract))
        rows: list[dict[str, Any]] = json.loads(
            ask("query", name, "--events", str(self.events), *limits, *options, "--format", "json")
        )
        return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("foreign")
    events, contract = path / "events", path / "contract.toml"
    contract.write_text(WIDE)
    with Stage(path) as stage:
        upstream, model = start_transformers(stage)
        url, control, _ = start_sidecar(stage, upstream, events, "--contract", str(contract), "--sql-every", "off")
        report = replay(url, control, events, contract)
        began_ns = time.time_ns()
        sync_calls(url, model, events, contract)
        asyncio.run(async_calls(url, model, events, contract))
        ended_ns = time.time_ns() + 2_000_000  # windows are written in milliseconds
        metrics = until(lambda: settled(control), 60, 0.5)
    rows = json.loads(ask("sql", "select * from requests", "--events", str(events), "--format", "json"))
    return Run(
        events,
        contract,
        calls={row["external_id"]: row for row in rows if row["external_id"]},
        replayed=[row for row in rows if not row["external_id"]],
        replay_report=report,
        metrics=metrics,
        calls_window=f"{format_instant(began_ns)}..{format_instant(ended_ns)}",
    )


def replay(url: str, control: str, events: Path, contract: Path) -> dict[str, Any]:
    """The first rows of the Azure trace, shortened; where there is no such file, rows of the same kind."""
    folder = field_folder()
    trace = str(folder / "traces/azure_llm_2023_code.csv") if folder else "synthetic:poisson?n=8&rate=1&prompt_p50=1000"
    out = ask(
        "replay", trace, "--url", url, "--events", str(events), "--contract", str(contract), "--receipts", control,
        "--limit", str(REPLAYED), "--rate", "1", "--scale-lengths", "0.15" if folder else "0.1", "--lengths", "capped",
        "--format", "json",
    )  # fmt: skip
    (row,) = json.loads(out)
    return dict(row)


def named(name: str, **headers: str) -> dict[str, str]:
    return {"x-request-id": name, **headers}


def sync_calls(url: str, model: str, events: Path, contract: Path) -> None:
    transport = ReceiptTransport(events, contract)
    options: dict[str, Any] = {"model": model, "stream": True}
    with openai.OpenAI(
        api_key="k", base_url=f"{url}/v1", max_retries=0, http_client=httpx.Client(transport=transport)
    ) as client:
        chat = client.chat.completions
        answer = list(chat.create(messages=QUESTION, max_tokens=40, extra_headers=named("stop"), **options))
        assert answer[-1].choices[0].finish_reason == "stop"

        whole = chat.create(
            model=model, messages=STORY, max_tokens=5, extra_headers=named("whole", **{"x-slo-class": "whole"})
        )
        assert whole.choices[0].finish_reason == "length"

        list(client.completions.create(prompt="The sea", max_tokens=6, extra_headers=named("completions"), **options))

        # The server computes one answer at a time. While it writes this one, which nobody reads, the next one waits.
        story = chat.create(messages=STORY, max_tokens=400, extra_headers=named("left"), **options)
        pieces = (piece for piece in story if piece.choices[0].delta.content)
        next(pieces), next(pieces)
        with pytest.raises((openai.APITimeoutError, httpx.TimeoutException)):
            list(
                chat.create(
                    messages=QUESTION, max_tokens=5, timeout=PAUSE_S, extra_headers=named("deadline"), **options
                )
            )
        next(pieces), next(pieces)
        story.close()

        with pytest.raises(openai.APIError):
            # An integer bias is an error to this server, which it finds only once it has answered 200.
            list(
                chat.create(messages=QUESTION, logit_bias={"2": -100}, extra_headers=named("in_band_error"), **options)
            )
        with pytest.raises(openai.UnprocessableEntityError):
            list(
                chat.create(
                    messages=QUESTION, extra_body={"ignore_eos": True}, extra_headers=named("http_error"), **options
                )
            )
    assert transport.observer_errors == 0, transport.last_error


async def async_calls(url: str, model: str, events: Path, contract: Path) -> None:
    transport = AsyncReceiptTransport(events, contract)
    async with openai.AsyncOpenAI(
        api_key="k", base_url=f"{url}/v1", max_retries=0, http_client=httpx.AsyncClient(transport=transport)
    ) as client:

        async def chat(name: str) -> None:
            stream = await client.chat.completions.create(
                model=model, messages=STORY, max_tokens=6, stream=True, extra_headers=named(name)
            )
            assert [piece async for piece in stream][-1].choices[0].finish_reason == "length"

        await asyncio.gather(chat("async_1"), chat("async_2"))
    assert transport.observer_errors == 0, transport.last_error


def settled(control: str) -> str:
    """The exposition of a sidecar with nothing in flight."""
    text = httpx.get(f"{control}/metrics").text
    assert total(text, "sloscope_sidecar_inflight_requests") == 0
    return text


def total(text: str, metric: str) -> float:
    """The sum over every label set. The metric must be there."""
    values = re.findall(rf"(?m)^{metric}(?:\{{[^}}]*\}})? (\S+)$", text)
    assert values, f"{metric} is not exposed"
    return sum(map(float, values))


def counted(text: str, metric: str, *labels: str) -> Counter[tuple[str, ...]]:
    """Counter values summed by these labels; those that stand at 0 are left out."""
    out: Counter[tuple[str, ...]] = Counter()
    for found, value in re.findall(rf"(?m)^{metric}\{{([^}}]*)\}} (\S+)$", text):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', found))
        out[tuple(pairs[label] for label in labels)] += int(float(value))
    return +out


def recorded_ends(events: Path, observer: str) -> list[dict[str, Any]]:
    return [
        record
        for path in journal_files(events)
        if path.parent.name == observer
        for record in read_journal(Tail(path))
        if record["kind"] == "end"
    ]


# --- what stands in the table ------------------------------------------------------------------------------------


def test_every_request_begun_is_one_row_with_both_sides(run: Run) -> None:
    begun: dict[str, list[str]] = {"client": [], "sidecar": []}
    for path in journal_files(run.events):
        begun[path.parent.name] += [r["request_id"] for r in read_journal(Tail(path)) if r["kind"] == "begin"]
    ids = sorted(row["request_id"] for row in run.rows)
    assert len(ids) == REPLAYED + 9
    assert sorted(begun["client"]) == sorted(begun["sidecar"]) == ids


# name of the call → outcome, reason, finish reason, source of the token count, status
ENDS = {
    "stop": ("completed", "", "stop", "usage", 200),
    "whole": ("completed", "", "length", "usage", 200),
    "completions": ("completed", "", "length", "usage", 200),
    "async_1": ("completed", "", "length", "usage", 200),
    "async_2": ("completed", "", "length", "usage", 200),
    "left": ("cancelled", "disconnect", None, "assumed_one", 200),
    "deadline": ("cancelled", "client_timeout", None, "assumed_one", 200),
    "in_band_error": ("failed", "in_band_error", None, "assumed_one", 200),
    "http_error": ("failed", "http_error", None, "assumed_one", 422),
}


def test_every_call_of_the_openai_package_ends_under_its_own_name(run: Run) -> None:
    fields = ("outcome", "reason", "finish_reason", "token_source", "http_status")
    ends = {name: tuple(row[f"client_{field}"] for field in fields) for name, row in run.calls.items()}
    assert ends == ENDS
    # The sidecar saw the same. Why a client left it learns from that client's own record.
    seen = {name: tuple(row[f"sidecar_{field}"] for field in fields) for name, row in run.calls.items()}
    assert seen == ENDS


def test_tokens_are_the_servers_where_it_stated_them_and_else_the_events_received(run: Run) -> None:
    tokens = {name: (row["client_tokens"], row["client_events"]) for name, row in run.calls.items()}
    assert tokens["whole"] == (5, 0)
    assert tokens["completions"] == tokens["async_1"] == tokens["async_2"] == (6, 6)
    assert tokens["left"] == (4, 4)
    assert tokens["deadline"] == tokens["in_band_error"] == tokens["http_error"] == (0, 0)
    # The token that ends the answer has no text: the server counts it, and no event brings it.
    assert tokens["stop"][0] == tokens["stop"][1] + 1


def test_a_role_chunk_starts_no_clock(run: Run) -> None:
    """The server answers 200 and sends the role while the request waits for its turn; no output ever came."""
    row = run.calls["deadline"]
    assert row["client_http_status"] == row["sidecar_http_status"] == 200
    assert row["client_ttft_ns"] is None and row["sidecar_ttft_ns"] is None
    assert row["client_stream_end_ns"] >= PAUSE_S * 1e9


def test_replayed_rows_carry_their_schedule_and_are_marked_as_forced(run: Run) -> None:
    assert len(run.replayed) == REPLAYED == run.replay_report["completed"] == run.replay_report["qualified"]
    for row in run.replayed:
        assert row["length_forced"] is True and row["stop_after"] is None
        assert row["client_outcome"] == row["sidecar_outcome"] == "completed"
        assert row["client_token_source"] == row["sidecar_token_source"] == "usage"
        reached = row["client_tokens"] == row["max_tokens"]
        assert row["client_finish_reason"] == ("length" if reached else "stop")
        assert row["client_ttft_intended_ns"] == row["client_ttft_ns"] + row["client_dispatch_lag_ns"]
        assert row["sidecar_ttft_ns"] <= row["client_ttft_ns"]


def test_what_only_an_engine_knows_is_null(run: Run) -> None:
    for row in run.rows:
        known = {name for name, value in row.items() if name.startswith("engine_") and value is not None}
        assert known == {"engine_observed"} and row["engine_observed"] is False
        assert row["client_alignment"] is None and row["sidecar_alignment"] is None


def test_neither_prompts_nor_answers_are_recorded(run: Run) -> None:
    for path in (path for path in run.events.rglob("*") if path.is_file()):
        data = path.read_bytes()
        assert b"capital of France" not in data and b"Paris" not in data, path


# --- what the questions say --------------------------------------------------------------------------------------


def test_goodput_is_what_the_rows_say_under_wide_limits_and_under_tight_ones(run: Run) -> None:
    print("\n" + ask("query", "goodput", "--events", str(run.events), "--contract", str(run.contract)))
    (row,) = run.query("goodput")
    assert (row["offered"], row["completed"], row["failed"], row["cancelled"]) == (17, 13, 2, 2)  # 8 + 9 requests
    assert (row["qualified"], row["unfinished"], row["unobserved"]) == (13, 0, 0)
    assert row["attainment"] == pytest.approx(13 / 17) and row["ttft_p99_s"] is None
    assert row["goodput_rps"] == pytest.approx(13 / row["window_s"])
    assert row["observed_tokens"] == sum(each["client_tokens"] for each in run.rows)
    assert row["observed_tokens"] - row["qualified_tokens"] == 4  # of the answer that its consumer left

    kept = [
        each
        for each in run.rows
        if each["client_outcome"] == "completed"
        and each["client_ttft_worst_ns"] is not None
        and each["client_ttft_worst_ns"] <= 300_000_000
        and (each["client_itl_max_ns"] or 0) <= 30_000_000
    ]
    (tight,) = run.query("goodput", goodput="ttft:300 itl_max:30")
    assert (tight["offered"], tight["qualified"]) == (17, len(kept))


def test_outcomes_at_the_sidecar_equal_its_counters(run: Run) -> None:
    ended = counted(run.metrics, "sloscope_sidecar_requests_total", "outcome", "reason")
    # A counter cannot be taken back: what SQL refines by the client's record, the sidecar counted as it saw it.
    as_seen = Counter((row["outcome"], row["reason"]) for row in recorded_ends(run.events, "sidecar"))
    assert ended == as_seen
    rows = run.query("outcomes", "--observer", "sidecar")
    refined = Counter({(row["outcome"], row["reason"]): row["requests"] for row in rows if row["requests"]})
    assert as_seen - refined == {("cancelled", "disconnect"): 1}
    assert refined - as_seen == {("cancelled", "client_timeout"): 1}
    (goodput,) = run.query("goodput", "--observer", "sidecar")
    assert total(run.metrics, "sloscope_sidecar_requests_qualified_total") == goodput["qualified"] == 13


def test_offered_is_what_ended_and_what_is_in_flight(run: Run) -> None:
    offered = total(run.metrics, "sloscope_sidecar_requests_offered_total")
    ended = total(run.metrics, "sloscope_sidecar_requests_total")
    assert offered == ended + total(run.metrics, "sloscope_sidecar_inflight_requests") == 17
    # The replay posted its receipts; the calls of the openai package stand in the journal alone.
    assert total(run.metrics, "sloscope_client_requests_offered_total") == REPLAYED
    assert total(run.metrics, "sloscope_client_requests_total") == REPLAYED
    assert not counted(run.metrics, "sloscope_engine_.*_total"), "a receipt stands under an engine's name"


def test_late_outputs_are_only_suspected_to_be_the_engines_or_a_buffers(run: Run) -> None:
    """10 ms between tokens is less than this model needs on a CPU, so that nearly every gap is late."""
    for observer in ("client", "sidecar"):
        holds = run.query("holds", "--observer", observer, goodput="itl_max:10")
        assert len(holds) >= 10
        assert {hold["verdict"] for hold in holds} <= AT_MOST | ({"client_late"} if observer == "client" else set())
        measured_by_engine = ("emit_gap_s", "delivery_s", "engine_share", "delivery_share", "alignment", "same_clock")
        assert {hold[name] for hold in holds for name in measured_by_engine} == {None}
        assert run.query("stall_causes", "--observer", observer, goodput="itl_max:10") == []


def test_the_consumer_that_did_not_read_is_named_and_nobody_else(run: Run) -> None:
    words = {row["external_id"]: row for row in run.query("request_diagnosis", goodput="itl_max:10")}
    assert words["left"]["verdict"] == "client_late" and words["left"]["longest_s"] >= PAUSE_S
    for name in ("stop", "completions", "async_1", "async_2"):
        assert words[name]["verdict"] in AT_MOST and words[name]["engine_share"] is None
    at_sidecar = {
        row["external_id"]: row for row in run.query("request_diagnosis", "--observer", "sidecar", goodput="itl_max:10")
    }
    assert at_sidecar["left"]["verdict"] in AT_MOST


def test_the_budget_has_the_links_between_client_and_sidecar_and_leaves_the_rest_unexplained(run: Run) -> None:
    links = {row["link"]: row for row in run.query("ttft_budget")}
    assert set(links) == {"dispatch", "network_out", "sidecar", "network_back", "residual", "total"}
    with_output = sum(row["client_ttft_ns"] is not None for row in run.rows)
    assert links["dispatch"]["n"] == REPLAYED
    assert {links[name]["n"] for name in ("network_out", "sidecar", "network_back", "residual")} == {with_output}
    time_s = {name: row["n"] * row["mean_s"] for name, row in links.items()}
    assert time_s["total"] == pytest.approx(sum(time_s.values()) - time_s["total"])
    assert time_s["residual"] > 0.5 * time_s["total"], "the server computes, and nothing of it is stamped"

    names = {row["request_id"]: name for name, row in run.calls.items()}
    without = {names[row["request_id"]]: row["reached"] for row in run.query("without_ttft")}
    assert without == dict.fromkeys(("whole", "deadline", "in_band_error", "http_error"), "sidecar")


def test_survival_refuses_forced_lengths_and_takes_the_rest(run: Run) -> None:
    with pytest.raises(ConfigError, match="length_forced"):
        run.query("survival")
    (row,) = run.query("survival", "--window", run.calls_window, "--param", "by=all")
    assert (row["requests"], row["n"], row["excluded"]) == (9, 9, 0)
    # One answer ended by itself; four met their cap, two were left, two failed.
    censored = [row[f"censored_{why}"] for why in ("cap", "cancelled", "failed", "unfinished", "other")]
    assert (row["events"], censored, row["assumed_tokens"]) == (1, [4, 2, 2, 0, 0], 4)
