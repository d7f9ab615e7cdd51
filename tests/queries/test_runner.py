"""A session: default window, read-only views, row cap, time limit, what is printed with a result."""

import time

import pytest

from queries.lab import START_AT_NS, WINDOW, write_journal
from queries.runner import Session
from sloscope.contract import preset
from sloscope.errors import QueryError
from tests.queries.cases import session_of

S = 1_000_000_000


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    events = tmp_path_factory.mktemp("lab")
    write_journal(events)
    with Session(events, preset("exercise"), contract_name="exercise", window=WINDOW) as session:
        yield session


def test_without_a_window_all_data_counts_in_whole_seconds(tmp_path):
    write_journal(tmp_path)
    with Session(tmp_path, preset("exercise")) as session:
        # the first arrival is at 0 s, the last at 14 s
        assert session.window == (START_AT_NS, START_AT_NS + 15 * S)
        assert session.meta("goodput").window_is == "all data, whole seconds"
        assert session.run("goodput").rows[0]["goodput_rps"] == 3 / 15


def test_without_a_window_the_warm_up_takes_no_time_and_is_still_counted():
    done = {"ttft_ms": 9, "tokens": 1, "outcome": "completed"}
    rows = [
        {"id": "warm", "arrival_s": 1.5, "warmup": True, "client": done},
        {"id": "A", "arrival_s": 10.25, "client": done},
        {"id": "B", "arrival_s": 13.75, "client": done},
    ]
    with session_of({"given": {"requests": rows}}) as session:
        assert session.window == (10 * S, 14 * S)
        row = session.run("goodput").rows[0]
    assert (row["offered"], row["warmup_excluded"], row["goodput_rps"]) == (2, 1, 2 / 4)
    with session_of({"given": {"requests": rows[:1]}}) as session:
        assert session.meta("goodput").window_is == "nothing but warm-up"
        row = session.run("goodput").rows[0]
    assert (row["offered"], row["warmup_excluded"], row["goodput_rps"]) == (0, 1, None)


def test_meta_names_the_rules_under_which_a_result_was_made(lab):
    meta = lab.run("goodput").meta
    assert (meta.question, meta.observer, meta.window_rule, meta.quantile_method) == (
        "goodput", "client", "drain 10m", "nearest_rank",
    )  # fmt: skip
    assert meta.contract_hash == preset("exercise").hash
    assert "2026-01-01T00:00:00.000Z..2026-01-01T00:00:20.000Z" in meta.line()


def test_a_row_cap_cuts_and_says_so(lab):
    capped = lab.run("requests", max_rows=3)
    assert len(capped.rows) == 3 and capped.truncated
    whole = lab.run("requests", max_rows=8)
    assert len(whole.rows) == 8 and not whole.truncated


def test_a_query_beyond_its_time_limit_is_stopped_and_the_session_lives_on(lab):
    with pytest.raises(QueryError, match=r"^sql: took longer than the limit of 0.2 s$"):
        lab.sql(
            "select count(*) from range(10000000) a, range(10000000) b where a.range % 7 = b.range % 11", timeout_s=0.2
        )
    assert lab.run("goodput", timeout_s=60).rows[0]["qualified"] == 3


def test_a_limit_that_passes_between_two_statements_holds_for_the_next(lab, monkeypatch):
    create = lab._create_views
    monkeypatch.setattr(lab, "_create_views", lambda names: (create(names), time.sleep(0.3)))
    began = time.monotonic()
    with pytest.raises(QueryError, match=r"^sql: took longer than the limit of 0.1 s$"):
        lab.sql(
            "select count(*) from range(10000000) a, range(10000000) b where a.range % 7 = b.range % 11", timeout_s=0.1
        )
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "text",
    [
        "drop view cohort",
        "create table t as select 1",
        "select 1; select 2",
        "copy (select 1) to '/tmp/sloscope-never.csv'",
        "attach '/tmp/sloscope-never.db'",
        "set threads = 1",
        "install httpfs",
        "insert into run_classes (class) values ('x')",
        "",
    ],
)
def test_own_sql_that_is_not_one_select_is_refused(lab, text):
    with pytest.raises(QueryError, match=r"accepted: one SELECT statement$"):
        lab.sql(text)


@pytest.mark.parametrize(
    "text",
    [
        "select * from read_text('/etc/hostname')",
        "select * from '/etc/passwd'",
        "select * from read_csv('/etc/passwd')",
        "select * from glob('/etc/*')",
        "select nope from cohort",
    ],
)
def test_own_sql_reaches_no_file_and_fails_in_one_line(lab, text):
    with pytest.raises(QueryError) as caught:
        lab.sql(text)
    assert str(caught.value).startswith("sql: ") and "\n" not in str(caught.value)


def test_new_records_are_seen_after_a_refresh(tmp_path):
    with Session(tmp_path, preset("exercise"), window=WINDOW) as session:
        assert session.run("goodput").rows[0]["offered"] == 0
        write_journal(tmp_path)
        session.refresh()
        assert session.run("goodput").rows[0]["offered"] == 8
        session.refresh(window=(START_AT_NS, START_AT_NS + 5 * S))
        assert session.run("goodput").rows[0]["offered"] == 3


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"observer": "proxy"}, "observer: 'proxy' is not accepted; accepted: client, sidecar, engine"),
        ({"window": (2, 1)}, "window: ends at 1 ns, before it starts at 2 ns"),
    ],
)
def test_a_session_that_makes_no_sense_is_refused(tmp_path, keywords, says):
    with pytest.raises(QueryError, match=says):
        Session(tmp_path, preset("exercise"), **keywords)


def test_a_missing_directory_is_named():
    with pytest.raises(QueryError, match="events: '/nowhere/at/all' is not a directory"):
        Session("/nowhere/at/all", preset("exercise"))
