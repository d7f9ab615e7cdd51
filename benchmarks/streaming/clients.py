"""Load generators of others, each of an installation of its own, and what each reports of every request.

Figures are taken from the reports as they stand. A report names the requests, so they are held to the source's stamps.
Where a tool has a switch that keeps it from sending the load that is asked of all, it is set.
"""

import json
import os
import subprocess
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

MS = 1e6
S = 1e9
WORDS = "local/words"  # the tokenizer that is made here


class Load(NamedTuple):
    name: str
    rate: int  # requests per second
    events: int  # of an answer
    events_per_s: float
    pause_ms: float
    ttft_ms: float = 200

    def requests(self, seconds: float) -> int:
        return round(self.rate * seconds)


class Seen(NamedTuple):
    """One request, by its own id or that of its answer; ns."""

    key: str
    ttft_ns: float | None
    gap_ns: float | None


Run = Callable[[str, Load, int, Path], list[Seen]]


class Client(NamedTuple):
    version: str
    run: Run  # the source's URL, the load, how many requests, an empty folder


def installed(python: Path, package: str) -> str:
    """Name and version of a package of that interpreter.

    Errors: ArgumentTypeError, as for an option's value.
    """
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise ArgumentTypeError(
            f"{str(python)!r} is not accepted; accepted: a Python with {package} installed"
        ) from None
    return f"{package} {done.stdout.strip()}"


def words(home: Path) -> None:
    """Into a cache of Hugging Face's: a tokenizer to which what stands between blanks is a token."""
    unknown = {"id": 0, "content": "[UNK]", "special": True}
    unknown |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    vocabulary = {"[UNK]": 0} | {f"word{number}": number for number in range(1, 1000)}
    whole = {
        "version": "1.0",
        "added_tokens": [unknown],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    revision = "0" * 40
    repository = home / "hub" / f"models--{WORDS.replace('/', '--')}"
    files = {
        f"snapshots/{revision}/tokenizer.json": json.dumps(whole),
        f"snapshots/{revision}/tokenizer_config.json": json.dumps(about),
        f"snapshots/{revision}/config.json": json.dumps({"model_type": "llama"}),  # asked for, and then not used
        "refs/main": revision,
    }
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)


def _run(command: list[str], folder: Path, tokenizer: str) -> None:
    """Errors: RuntimeError with the last lines that the tool said."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if tokenizer == WORDS:
        words(folder / "home")
        env["HF_HOME"] = str(folder / "home")
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, env=env, check=False)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}; it said: {said}")


def aiperf(python: Path, tokenizer: str) -> Client:
    def run(url: str, load: Load, requests: int, folder: Path) -> list[Seen]:
        command = [
            str(python.parent / "aiperf"), "profile", "--model", "bench", "--url", url, "--endpoint-type", "chat",
            "--streaming", "--request-rate", str(load.rate), "--arrival-pattern", "constant", "--request-count",
            str(requests), "--tokenizer", tokenizer, "--isl", "8", "--osl", str(load.events), "--artifact-dir",
            str(folder), "--export-level", "records", "--ui", "none",
        ]  # fmt: skip
        _run(command, folder, tokenizer)
        rows = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]
        return [
            Seen(
                row["metadata"]["x_request_id"],
                row["metrics"]["time_to_first_token"]["value"] * MS,
                max(row["metrics"]["inter_chunk_latency"]["value"]) * MS,
            )
            for row in rows
            if "time_to_first_token" in row["metrics"]
        ]

    return Client(installed(python, "aiperf"), run)


def guidellm(python: Path, tokenizer: str) -> Client:
    def run(url: str, load: Load, requests: int, folder: Path) -> list[Seen]:
        out = folder / "guidellm.json"
        command = [
            str(python.parent / "guidellm"), "run", "--backend", f"kind=openai_http,target={url},model=bench",
            "--profile", f"kind=constant,rate={load.rate}", "--constraint", f"kind=max_requests,count={requests}",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--data",
            f"kind=synthetic_text,prompt_tokens=8,output_tokens={load.events}", "--output", f"kind=json,path={out}",
            "--disable-console",
        ]  # fmt: skip
        _run(command, folder, tokenizer)
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
        rows = benchmark["requests"]["successful"]
        return [Seen(row["response_id"], row["time_to_first_token_ms"] * MS, None) for row in rows]

    return Client(installed(python, "guidellm"), run)


def inference_perf(python: Path, tokenizer: str) -> Client:
    """Its constant rate draws the gaps, so the grid is given as a trace, which it sends to `/v1/completions` only."""

    def run(url: str, load: Load, requests: int, folder: Path) -> list[Seen]:
        (folder / "trace.csv").write_text(_grid(load, requests))
        (folder / "config.yml").write_text(json.dumps(_inference_perf(url, load, requests, folder, tokenizer)))
        _run([str(python.parent / "inference-perf"), "--config_file", "config.yml"], folder, tokenizer)
        rows = json.loads((folder / "report" / "per_request_lifecycle_metrics.json").read_text())
        return [_seen(row) for row in rows if row["error"] is None]

    return Client(installed(python, "inference-perf"), run)


def _inference_perf(url: str, load: Load, requests: int, folder: Path, tokenizer: str) -> Mapping[str, Any]:
    trace = {"file": str(folder / "trace.csv"), "format": "AzurePublicDataset"}
    stage = {"rate": load.rate, "duration": max(1, round(requests / load.rate))}
    fields = {"request": False, "response": False, "computed_metrics": True}
    return {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", "trace": trace},
        # By default a worker has 100 requests open at most, and those behind wait.
        "load": {"type": "trace_replay", "trace": trace, "stages": [stage], "worker_max_concurrency": 4096},
        "server": {"type": "vllm", "model_name": "bench", "base_url": url},
        "tokenizer": {"pretrained_model_name_or_path": tokenizer},
        "report": {"request_lifecycle": {"per_request": True, "per_request_fields": fields}},
        "storage": {"local_storage": {"path": str(folder / "report")}},
    }


def _grid(load: Load, requests: int) -> str:
    first = datetime(2024, 1, 1)
    due = [first + timedelta(seconds=number / load.rate) for number in range(requests)]
    rows = [f"{at:%Y-%m-%d %H:%M:%S.%f},8,{load.events}" for at in due]
    return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n"


def _seen(row: Mapping[str, Any]) -> Seen:
    (answer, *_), said = row["info"]["response_metrics"]["response_chunks"], row["computed_metrics"]
    return Seen(json.loads(answer)["id"], said["time_to_first_token"] * S, max(said["inter_token_latencies"]) * S)
