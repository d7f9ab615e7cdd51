"""`transformers serve` on SmolLM2: a server that is not ours, as a child process.

    python -m tests.end_to_end.foreign_server DIRECTORY      writes the model for it

It wants a Hugging Face directory. That is made once from the GGUF file that our own server runs, by `transformers`
itself in a process of its own, and kept in the model cache.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from reference_server.model_store import default_cache_dir, fetch_smollm2
from sloscope.demo.processes import Stage
from tests.end_to_end.support import free_port, until


def smollm2_directory() -> Path:
    """SmolLM2 as `transformers` saves it, in float32. It appears under its name only when whole, by one rename."""
    directory = default_cache_dir() / "hf-smollm2"
    if directory.is_dir():
        return directory
    fetch_smollm2()
    scratch = tempfile.mkdtemp(prefix=".hf-smollm2-", dir=directory.parent)
    try:
        subprocess.run(
            [sys.executable, "-m", "tests.end_to_end.foreign_server", scratch],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, check=True, timeout=240,
        )  # fmt: skip
        try:
            os.rename(scratch, directory)
        except OSError:
            # Another run was faster; a rename onto a directory that holds files fails and harms neither.
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def start_transformers(stage: Stage) -> tuple[str, str]:
    """(URL, model name) of a running server, on one thread and behind everybody else's work."""
    model, port = str(smollm2_directory()), free_port()
    stage.start(
        "transformers", "/usr/bin/env", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", "nice",
        str(Path(sys.executable).with_name("transformers")), "serve", model, "--host", "127.0.0.1",
        "--port", str(port), "--device", "cpu", "--dtype", "float32",
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    until(lambda: httpx.get(f"{url}/health").status_code == 200, 120, 0.2)
    return url, model


def _convert(target: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = fetch_smollm2()
    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # What was read from a GGUF file counts as quantised and cannot be saved, though its tensors are float32 by now.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(target)


if __name__ == "__main__":
    _convert(sys.argv[1])
