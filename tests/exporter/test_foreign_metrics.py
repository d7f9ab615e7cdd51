"""Other people's metrics: what is read from their texts, and what an engine can do to the sidecar that polls it."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from exporter import cli, engine_metrics
from exporter.control_plane import ControlPlane, create_app
from exporter.engine_metrics import FAILURES, MAX_BYTES, MAX_LINE, MAX_SERIES, SKIPPED, LabelLimit, Reading, read
from exporter.settings import parse_engine_metrics
from sloscope import catalogue
from sloscope.clock import SystemClock
from sloscope.errors import ConfigError
from sloscope.exposition import MetricStore
from sloscope.foreign_names import FAMILY_PREFIX, NOT_MAPPED, SOURCES, families
from tests.exporter.engine_texts import LLAMACPP, MODEL, SGLANG, TGI, histogram, vllm
from tests.exporter.harness import Script, ScriptedUpstream, Seen, run, samples, settings_for, total


def parsed(text: str) -> Reading:
    return read(text, LabelLimit(50))


def value(reading: Reading, family: str, kind: str, *more: str, model: str = MODEL) -> float:
    return reading.values[FAMILY_PREFIX + family, (kind, model, *more)]


def buckets(reading: Reading, family: str, kind: str, model: str = MODEL) -> tuple[dict[float, float], float]:
    found = reading.histograms[FAMILY_PREFIX + family, (kind, model)]
    return dict(found.counts), found.sum


# --- the table ------------------------------------------------------------------------------------------------


def test_every_source_feeds_a_family_of_the_catalogue_and_every_family_has_one() -> None:
    assert {source.metric.name for source in SOURCES} == {metric.name for metric in families()}
    for metric in families():
        assert metric.name.startswith(FAMILY_PREFIX) and metric.labels[:3] == ("upstream", "kind", "model")
        assert metric.buckets == ()  # the engine's own


def test_no_name_is_both_mapped_and_not_mapped() -> None:
    mapped = {name for source in SOURCES for name in source.spellings()}
    assert mapped & NOT_MAPPED.keys() == set()
    # A histogram's series are not mapped under another name either, but for the sums that are counters of tokens.
    assert {name for name in mapped if name.endswith("_sum")} == {
        "tgi_request_input_length_sum",
        "tgi_request_generated_tokens_sum",
    }


def test_what_says_a_reason_feeds_a_family_with_that_label_and_the_reverse() -> None:
    for source in SOURCES:
        assert bool(source.reason_label or source.reason) == ("reason" in source.metric.labels), source


# --- reading --------------------------------------------------------------------------------------------------


def test_vllm_is_read_with_its_own_edges() -> None:
    found = parsed(vllm())
    assert value(found, "requests_running", "vllm") == 3
    assert value(found, "requests_waiting", "vllm") == 2
    assert value(found, "kv_usage_ratio", "vllm") == 0.25
    assert value(found, "prompt_tokens_total", "vllm") == 400
    assert value(found, "generation_tokens_total", "vllm") == 90
    assert value(found, "preemptions_total", "vllm") == 4
    assert value(found, "requests_total", "vllm", "stop") == 7
    assert value(found, "requests_total", "vllm", "abort") == 1
    assert value(found, "prefix_queried_tokens_total", "vllm") == 400
    assert value(found, "prefix_reused_tokens_total", "vllm") == 100
    assert buckets(found, "ttft_seconds", "vllm") == ({0.1: 2, 0.25: 6, math.inf: 8}, 1.5)
    assert buckets(found, "token_interval_seconds", "vllm") == ({0.01: 0, 0.025: 80, math.inf: 82}, 1.64)
    assert buckets(found, "queue_seconds", "vllm") == ({0.3: 8, math.inf: 8}, 0.2)
    assert buckets(found, "e2e_seconds", "vllm") == ({0.3: 0, 0.5: 7, math.inf: 8}, 3.3)
    assert found.skipped == {}


def test_older_names_of_vllm_mean_the_same() -> None:
    new = parsed(vllm())
    old = vllm(kv="vllm:gpu_cache_usage_perc", interval="vllm:time_per_output_token_seconds")
    old = old.replace("vllm:prefix_cache_", "vllm:gpu_prefix_cache_")
    assert parsed(old)[:2] == new[:2]
    without = vllm()
    for name in ("prompt_tokens", "generation_tokens", "num_preemptions", "request_success", "prefix_cache_hits"):
        without = without.replace(f"vllm:{name}_total", f"vllm:{name}")
    assert parsed(without)[:2] == new[:2]


def test_an_engine_that_exposes_an_old_and_a_new_name_is_counted_once() -> None:
    labels = f'engine="0",model_name="{MODEL}"'
    both = vllm() + histogram("vllm:time_per_output_token_seconds", labels, ("0.01", "0.025"), (0, 80, 82), 1.64)
    assert parsed(both)[:2] == parsed(vllm())[:2]


def test_ranks_with_requests_of_their_own_add_up_and_the_fullest_cache_shows() -> None:
    found = parsed(vllm("0") + vllm("1", scale=2))
    assert value(found, "requests_running", "vllm") == 3 + 3
    assert value(found, "prompt_tokens_total", "vllm") == 400 + 800
    assert value(found, "requests_total", "vllm", "stop") == 7 + 14
    assert value(found, "kv_usage_ratio", "vllm") == 0.5  # of 0.25 and 0.5, not 0.75
    assert buckets(found, "ttft_seconds", "vllm") == ({0.1: 2 + 4, 0.25: 6 + 12, math.inf: 8 + 16}, 4.5)


def test_ranks_that_run_one_model_together_are_counted_once() -> None:
    found = parsed(SGLANG)
    assert value(found, "requests_running", "sglang") == 5  # tp ranks 0 and 1 say 5 each
    assert value(found, "requests_waiting", "sglang") == 6
    assert value(found, "kv_usage_ratio", "sglang") == 0.28


def test_sglang_is_read_streaming_and_not() -> None:
    found = parsed(SGLANG)
    assert value(found, "prompt_tokens_total", "sglang") == 300 + 300
    assert value(found, "prefix_queried_tokens_total", "sglang") == 300 + 300
    assert value(found, "prefix_reused_tokens_total", "sglang") == 120
    assert value(found, "requests_total", "sglang", "any") == 10 + 10
    assert buckets(found, "ttft_seconds", "sglang") == ({0.1: 1, 0.2: 2, math.inf: 4}, 0.9)
    assert buckets(found, "token_interval_seconds", "sglang") == ({0.002: 10, math.inf: 40}, 0.5)


def test_llamacpp_has_no_histogram_and_none_is_made_up() -> None:
    found = parsed(LLAMACPP)
    assert found.histograms == {}
    assert value(found, "requests_running", "llamacpp", model="unknown") == 1
    assert value(found, "requests_waiting", "llamacpp", model="unknown") == 4
    assert value(found, "prompt_tokens_total", "llamacpp", model="unknown") == 479209
    assert value(found, "generation_tokens_total", "llamacpp", model="unknown") == 123063
    assert len(found.values) == 4


def test_tgi_tells_no_time_to_first_token_and_none_is_made_up() -> None:
    found = parsed(TGI)
    assert value(found, "requests_running", "tgi", model="unknown") == 8
    assert value(found, "requests_waiting", "tgi", model="unknown") == 3
    assert value(found, "requests_total", "tgi", "success", model="unknown") == 40
    assert value(found, "requests_total", "tgi", "overloaded", model="unknown") == 2
    assert value(found, "requests_total", "tgi", "validation", model="unknown") == 1
    assert value(found, "generation_tokens_total", "tgi", model="unknown") == 5000
    counts, seconds = buckets(found, "queue_seconds", "tgi", model="unknown")
    assert (list(counts.values()), seconds) == ([30, 39, 40], 0.009)
    assert {name for name, _ in found.histograms} == {f"{FAMILY_PREFIX}queue_seconds"}


def test_our_own_engine_is_read_by_its_states_and_blocks() -> None:
    store = MetricStore("server")
    for state, count in (("WAITING", 2), ("PREFILL", 1), ("DECODE", 4), ("PAUSED", 8), ("PREEMPTED", 16)):
        store.set("sloscope_engine_requests", count, (state,))
    for kind, blocks in (("resident", 30), ("reserved", 20), ("free", 50)):
        store.set("sloscope_engine_kv_blocks", blocks, (kind,))
    store.set("sloscope_engine_info", 1, (MODEL,))
    store.inc("sloscope_engine_prompt_tokens_total", 70)
    store.inc("sloscope_engine_prefix_reused_tokens_total", 30)
    store.inc("sloscope_engine_requests_ended_total", 3, ("completed",))
    store.observe("sloscope_engine_ttft_seconds", 30_000_000)
    found = parsed(store.render().decode())
    assert value(found, "requests_running", "sloscope") == 1 + 4
    assert value(found, "requests_waiting", "sloscope") == 2 + 16
    assert value(found, "kv_usage_ratio", "sloscope") == 0.3  # 30 / (30 + 20 + 50)
    assert value(found, "prompt_tokens_total", "sloscope") == 70 + 30
    assert value(found, "prefix_queried_tokens_total", "sloscope") == 70 + 30
    assert value(found, "prefix_reused_tokens_total", "sloscope") == 30
    assert value(found, "requests_total", "sloscope", "completed") == 3
    counts, seconds = buckets(found, "ttft_seconds", "sloscope")
    assert (counts[0.02], counts[0.04], seconds) == (0, 1, 0.03)
    assert found.skipped == {}


def test_no_kv_blocks_at_all_is_no_share_rather_than_a_division_by_zero() -> None:
    found = parsed('sloscope_engine_kv_blocks{kind="resident"} 0\nsloscope_engine_kv_blocks{kind="free"} 0\n')
    assert found.values == {}


def test_openmetrics_with_exemplars_says_the_same() -> None:
    exemplar = ' # {trace_id="4bf92f3577b34da6"} 0.067 1520879607.789'
    lines = [line + exemplar if "_bucket{" in line else line for line in vllm().splitlines()]
    open_metrics = "\n".join([*lines, "# EOF"]) + "\n"
    assert open_metrics.count("trace_id") > 10
    found = parsed(open_metrics)
    assert found[:2] == parsed(vllm())[:2] and found.skipped == {}


def test_timestamps_and_exponents_are_understood() -> None:
    found = parsed('vllm:prompt_tokens_total{model_name="m"} 8.128902e+06 1395066363000\r\n')
    assert value(found, "prompt_tokens_total", "vllm", model="m") == 8128902
    assert found.skipped == {}


def test_nan_and_infinity_are_never_passed_on() -> None:
    found = parsed('vllm:kv_cache_usage_perc{model_name="m"} NaN\nvllm:num_requests_running{model_name="m"} +Inf\n')
    assert found.values == {} and found.skipped == {"not_finite": 2}
    labels = 'model_name="m"'
    text = histogram("vllm:time_to_first_token_seconds", labels, ("0.1",), (1, 2), math.nan)
    found = parsed(text)
    assert found.histograms == {} and found.skipped == {"not_finite": 1, "bad_histogram": 1}


def test_a_sum_that_overflows_is_not_passed_on_either() -> None:
    name = "vllm:time_to_first_token_seconds"
    text = "".join(
        histogram(name, f'engine="{number}",model_name="m"', ("0.1",), (1, 2), 1e308)
        + f'vllm:prompt_tokens_total{{engine="{number}",model_name="m"}} 1e308\n'
        + f'sloscope_engine_kv_blocks{{engine="{number}",kind="resident"}} 1e308\n'
        for number in range(2)
    )
    found = parsed(text)
    assert found.values == {} and found.skipped == {"bad_histogram": 1}
    assert buckets(found, "ttft_seconds", "vllm", model="m") == ({0.1: 1, math.inf: 2}, 1e308)  # of the first alone


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{model_name="m} 3',
        'vllm:num_requests_running{model_name="m"} three',
        'vllm:num_requests_running{model_name="m",model_name="n"} 3',
        'vllm:num_requests_running{model_name="m"} 3 then',
        "vllm:num_requests_running",
        "vllm:num_requests_running " + "9" * 400,
        'vllm:num_requests_running{a="' + "x" * MAX_LINE + '"} 3',
        'vllm:time_to_first_token_seconds_bucket{le="wide"} 3',
        "<html>",
        '{"error": 1}',
        "\x00\x01",
    ],
)
def test_a_bad_line_costs_itself_and_is_counted(line: str) -> None:
    found = parsed(f"{line}\n{vllm()}{line}\n")
    assert found[:2] == parsed(vllm())[:2]
    assert found.skipped == {"bad_line": 2}


@pytest.mark.parametrize("missing", ['le="+Inf"', "_seconds_sum"])
def test_a_histogram_that_lost_a_line_is_left_out_whole(missing: str) -> None:
    text = histogram("vllm:time_to_first_token_seconds", 'model_name="m"', ("0.1", "0.2"), (1, 2, 4), 0.9)
    found = parsed("\n".join(line for line in text.splitlines() if missing not in line))
    assert found.histograms == {} and found.skipped == {"bad_histogram": 1}


def test_a_histogram_whose_counts_fall_is_left_out() -> None:
    found = parsed(histogram("vllm:time_to_first_token_seconds", 'model_name="m"', ("0.1", "0.2"), (3, 2, 4), 0.9))
    assert found.histograms == {} and found.skipped == {"bad_histogram": 1}


def test_histograms_of_different_edges_add_up_at_those_that_both_have() -> None:
    name = "vllm:time_to_first_token_seconds"
    text = histogram(name, 'engine="0",model_name="m"', ("0.1", "0.2"), (1, 2, 4), 0.9)
    text += histogram(name, 'engine="1",model_name="m"', ("0.1", "0.3"), (10, 20, 40), 9.0)
    assert buckets(parsed(text), "ttft_seconds", "vllm", model="m") == ({0.1: 11, math.inf: 44}, 9.9)


def test_a_flood_of_models_ends_in_other_and_a_flood_of_series_at_the_limit() -> None:
    lines = [f'vllm:num_requests_running{{model_name="m{number}"}} 1' for number in range(MAX_SERIES + 7)]
    found = read("\n".join(lines), LabelLimit(3))
    counts = {labels[1]: number for (_, labels), number in found.values.items()}
    assert counts == {"m0": 1, "m1": 1, "m2": 1, "other": MAX_SERIES - 3}
    assert found.skipped == {"too_many": 7}
    long = read(f'vllm:num_requests_running{{model_name="{"m" * 300}"}} 1', LabelLimit(3))
    assert [labels[1] for _, labels in long.values] == ["other"]


_NAMES = ("vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket", "model_name", "le", "_total")
_MARKS = ("{", "}", '"', "\\", ",", "=", " ", "\n", "\t", "#", "# TYPE ", "1", "-", "1e400", "NaN", "é", "\u2028")


@given(st.lists(st.sampled_from(_NAMES + _MARKS), max_size=40).map("".join))
def test_whatever_comes_reading_does_not_fail_and_passes_only_numbers(text: str) -> None:
    found = parsed(text)
    assert set(found.skipped) <= set(SKIPPED)
    assert all(math.isfinite(number) for number in found.values.values())


# --- the option -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "label", "asked"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("http://127.0.0.1:8000/", "127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("http://127.0.0.1:8000/metrics", "127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("http://engine/a/metrics", "engine:80/a/metrics", "http://engine/a/metrics"),
        ("https://engine", "engine:443", "https://engine/metrics"),
        ("http://[::1]:8000", "[::1]:8000", "http://[::1]:8000/metrics"),
    ],
)
def test_a_url_is_asked_at_metrics_unless_it_names_a_path(url: str, label: str, asked: str) -> None:
    assert parse_engine_metrics(url) == (label, asked)


@pytest.mark.parametrize(
    ("urls", "every", "said"),
    [
        (["ftp://x"], "5s", "--engine-metrics: 'ftp://x' is not accepted; accepted: http://"),
        (["http://u:p@x"], "5s", "--engine-metrics: must not carry credentials"),
        (
            ["http://x:8000", "http://x:8000/metrics"],
            "5s",
            "is the same as 'http://x:8000'; accepted: each engine once",
        ),
        (["http://x"], "1ms", "--engine-metrics-every: '1ms' is not accepted; accepted: at least 100ms"),
        (["http://x"], "soon", "--engine-metrics-every: 'soon' is not a duration"),
    ],
)
def test_what_cannot_be_polled_is_refused_before_anything_starts(urls: list[str], every: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        cli._engine_metrics(urls, every)


# --- polling --------------------------------------------------------------------------------------------------


def answer(body: bytes, head: str = "HTTP/1.1 200 OK") -> Script:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{head}\r\ncontent-type: text/plain; version=0.0.4\r\n".encode())
        writer.write(f"content-length: {len(body)}\r\n\r\n".encode() + body)

    return script


@asynccontextmanager
async def polling(tmp_path: Path, *urls: str, every_ms: int = 100, **changes: Any):  # type: ignore[no-untyped-def]
    """A control plane that polls as it does when it runs."""
    settings = settings_for(
        tmp_path, "/none", ("http://a",), engine_metrics=urls, engine_metrics_every_ns=every_ms * 1_000_000, **changes
    )
    control = ControlPlane(settings, SystemClock())
    app = create_app(control)
    async with app.router.lifespan_context(app):
        yield control


@asynccontextmanager
async def engine(script: Script):  # type: ignore[no-untyped-def]
    server = ScriptedUpstream(script)
    try:
        yield server, await server.start()
    finally:
        await server.stop()


async def until(what: Callable[[], Any], timeout_s: float = 30) -> Any:
    async with asyncio.timeout(timeout_s):
        while not (found := what()):
            await asyncio.sleep(0.01)
        return found


def up(control: ControlPlane, url: str) -> float:
    return total(control.store, f"{FAMILY_PREFIX}up", upstream=url.removeprefix("http://"))


def failures(control: ControlPlane, cause: str) -> float:
    return total(control.store, f"{FAMILY_PREFIX}scrape_failures_total", cause=cause)


def test_what_an_engine_says_stands_in_our_exposition_as_it_came(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(answer(vllm().encode())) as (server, url), polling(tmp_path, url) as control:
            await until(lambda: up(control, url))
            assert server.seen[0].line == b"GET /metrics HTTP/1.1"  # a URL without a path
            text = control.store.render().decode()
            assert "NaN" not in text
            family = f"{FAMILY_PREFIX}ttft_seconds"
            by_edge = {
                sample.labels["le"]: sample.value for sample in samples(control.store, f"{family}_bucket", kind="vllm")
            }
            assert by_edge == {"0.1": 2, "0.25": 6, "+Inf": 8}
            assert total(control.store, f"{family}_sum") == 1.5 and total(control.store, f"{family}_count") == 8
            (sample,) = samples(control.store, f"{FAMILY_PREFIX}requests_total", reason="stop")
            assert sample.labels == {
                "upstream": url.removeprefix("http://"), "kind": "vllm", "model": MODEL, "reason": "stop"
            }  # fmt: skip
            assert total(control.store, f"{FAMILY_PREFIX}scrape_seconds") > 0
            # Every scraper can read it, and each family stands once.
            names = [family.name for family in text_string_to_metric_families(text)]
            assert len(names) == len(set(names))

    run(test())


def test_edges_are_spelled_as_ours_are(tmp_path: Path) -> None:
    text = histogram("vllm:time_to_first_token_seconds", 'model_name="m"', ("1", "2.50", "1e1"), (1, 2, 3, 4), 9.0)

    async def test() -> None:
        async with engine(answer(text.encode())) as (_, url), polling(tmp_path, url) as control:
            await until(lambda: up(control, url))
            family = f"{FAMILY_PREFIX}ttft_seconds_bucket"
            assert [sample.labels["le"] for sample in samples(control.store, family)] == ["1.0", "2.5", "10.0", "+Inf"]

    run(test())


def test_two_engines_are_told_apart_and_a_path_of_ones_own_is_kept(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            engine(answer(vllm().encode())) as (_, first),
            engine(answer(LLAMACPP.encode())) as (second_server, second),
            polling(tmp_path, first, f"{second}/engine/metrics") as control,
        ):
            await until(lambda: total(control.store, f"{FAMILY_PREFIX}up") == 2)
            assert second_server.seen[0].line == b"GET /engine/metrics HTTP/1.1"
            running = {
                (sample.labels["upstream"], sample.labels["kind"]): sample.value
                for sample in samples(control.store, f"{FAMILY_PREFIX}requests_running")
            }
            assert running == {
                (first.removeprefix("http://"), "vllm"): 3,
                (f"{second.removeprefix('http://')}/engine/metrics", "llamacpp"): 1,
            }

    run(test())


def test_an_engine_that_starts_again_counts_from_zero_here_too(tmp_path: Path) -> None:
    texts = [vllm(scale=3), vllm()]

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await answer(texts[min(seen.connection, 1)].encode())(seen, writer)

    async def test() -> None:
        async with engine(script) as (_, url), polling(tmp_path, url) as control:
            family = f"{FAMILY_PREFIX}generation_tokens_total"
            await until(lambda: total(control.store, family) == 270)
            await until(lambda: total(control.store, family) == 90)
            assert total(control.store, f"{FAMILY_PREFIX}ttft_seconds_count") == 8

    run(test())


async def slow(_: Seen, writer: asyncio.StreamWriter) -> None:
    """A byte at a time, for ever."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    while True:
        writer.write(b"v")
        await asyncio.sleep(0.02)


async def endless(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
    line = b'vllm:num_requests_running{model_name="m"} 1\n' * 1000
    for _ in range(3 * MAX_BYTES // len(line)):
        writer.write(line)
        await writer.drain()


async def rubbish(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
    writer.close()


async def broken_off(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\nvllm:num_requests_running 1\n")
    writer.close()


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (slow, "timeout"),
        (endless, "too_large"),
        (rubbish, "bad_http"),
        (broken_off, "bad_http"),
        (answer(b"not here", "HTTP/1.1 404 Not Found"), "status"),
        (answer(b"", "HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/"), "status"),
        (answer(b"<html><body>welcome</body></html>"), "not_metrics"),
        (answer(b""), "not_metrics"),
        (answer(bytes(range(256)) * 40), "not_metrics"),
        (answer(b"process_cpu_seconds_total 12.5\n"), "unknown_names"),
    ],
)
def test_an_engine_that_does_not_tell_is_down_counted_and_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script, cause: str
) -> None:
    if cause == "timeout":
        monkeypatch.setattr(engine_metrics, "PATIENCE_S", 0.5)

    async def test() -> None:
        family = f"{FAMILY_PREFIX}scrape_failures_total"
        async with (
            engine(script) as (_, bad),
            engine(answer(vllm().encode())) as (good_server, good),
            polling(tmp_path, bad, good) as control,
        ):
            await until(lambda: failures(control, cause) >= 2)
            await until(lambda: len(good_server.seen) >= 3 and up(control, good))  # polled on
            assert up(control, bad) == 0
            label = bad.removeprefix("http://")
            causes = {each: total(control.store, family, upstream=label, cause=each) for each in FAILURES}
            assert {each for each, count in causes.items() if count} == {cause}
            shown = {sample.labels["upstream"] for sample in samples(control.store, f"{FAMILY_PREFIX}requests_running")}
            assert shown == {good.removeprefix("http://")}

    run(test())


def test_an_engine_that_goes_away_takes_its_series_along_and_brings_them_back(tmp_path: Path) -> None:
    async def test() -> None:
        server = ScriptedUpstream(answer(vllm().encode()))
        url = await server.start()
        port = int(url.rpartition(":")[2])
        async with polling(tmp_path, url) as control:
            family = f"{FAMILY_PREFIX}requests_running"
            await until(lambda: up(control, url) and total(control.store, family) == 3)
            await server.stop()
            await until(lambda: failures(control, "connect") >= 1)
            assert up(control, url) == 0 and samples(control.store, family) == []
            again = ScriptedUpstream(answer(vllm().encode()))
            again_server = await asyncio.start_server(again._serve, "127.0.0.1", port)
            await until(lambda: up(control, url) and total(control.store, family) == 3)
            again_server.close()
            await again.stop()

    run(test())


def test_lines_that_were_skipped_are_counted_with_the_engine_up(tmp_path: Path) -> None:
    text = vllm() + "vllm:num_requests_running{\nvllm:kv_cache_usage_perc NaN\n"

    async def test() -> None:
        async with engine(answer(text.encode())) as (_, url), polling(tmp_path, url) as control:
            family = f"{FAMILY_PREFIX}lines_skipped_total"
            await until(lambda: total(control.store, family, cause="bad_line") >= 2)
            assert total(control.store, family, cause="not_finite") >= 1
            assert up(control, url) == 1

    run(test())


def test_before_the_first_answer_an_engine_is_down_and_every_cause_stands_at_zero(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "/none", ("http://a",), engine_metrics=("http://127.0.0.1:9",))
    control = ControlPlane(settings, SystemClock())
    assert up(control, "http://127.0.0.1:9") == 0
    causes = {sample.labels["cause"] for sample in samples(control.store, f"{FAMILY_PREFIX}scrape_failures_total")}
    assert causes == set(FAILURES)


def test_no_engine_asked_for_no_series(tmp_path: Path) -> None:
    control = ControlPlane(settings_for(tmp_path, "/none", ("http://a",)), SystemClock())
    ours = [metric.name for metric in catalogue.METRICS if metric.name.startswith(FAMILY_PREFIX)]
    assert [name for name in ours if samples(control.store, name)] == []
    assert control.engines.pollers() == []


def test_reading_leaves_the_loop_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done in a thread: the longest text takes seconds."""
    threads: list[bool] = []

    def where(text: str, limit: engine_metrics.Limit) -> Reading:
        try:
            asyncio.get_running_loop()
            threads.append(False)
        except RuntimeError:
            threads.append(True)
        return read(text, limit)

    monkeypatch.setattr(engine_metrics, "read", where)

    async def test() -> None:
        async with engine(answer(vllm().encode())) as (_, url), polling(tmp_path, url) as control:
            await until(lambda: up(control, url))

    run(test())
    assert threads and all(threads)
