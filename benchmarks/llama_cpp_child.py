"""llama.cpp for `engine_cpu`, in an environment of its own: one JSON request a line in, one answer a line out.

Needs llama-cpp-python and nothing of this project.
"""

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp  # type: ignore[import-not-found]  # lives in an environment of its own

GGML_TYPES = {"float32": 0, "bfloat16": 30}  # of the KV


class Model:
    def __init__(self, path: str, prompts: list[list[int]], dtype: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.prompts = prompts
        self.context = len(prompts[0])
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not model:
            sys.exit(f"{path}: llama.cpp does not load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = len(prompts) * (self.context + 256)
        params.n_batch = params.n_ubatch = max(self.context, len(prompts))
        params.n_seq_max = len(prompts)
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = GGML_TYPES[dtype]
        self.ctx = llama_cpp.llama_init_from_model(model, params)
        if not self.ctx:
            sys.exit(f"{path}: llama.cpp gives no context of {params.n_ctx} tokens")
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        for sequence in range(len(prompts)):
            self.fill(sequence)

    def fill(self, sequence: int) -> float:
        llama_cpp.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        last = self.context - 1
        rows = [(token, at, sequence, at == last) for at, token in enumerate(self.prompts[sequence])]
        return self.run(rows)

    def decode(self, sequences: int) -> float:
        took = self.run([(1, self.context, sequence, True) for sequence in range(sequences)])
        for sequence in range(sequences):
            llama_cpp.llama_memory_seq_rm(self.memory, sequence, self.context, -1)
        return took

    def run(self, rows: list[tuple[int, int, int, bool]]) -> float:
        """(token, position, sequence, whether its logits are wanted) of each row; wall milliseconds."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        start_ns = time.perf_counter_ns()
        code = llama_cpp.llama_decode(self.ctx, batch)
        llama_cpp.llama_synchronize(self.ctx)
        took_ns = time.perf_counter_ns() - start_ns
        if code != 0:
            sys.exit(f"llama_decode: code {code} for {len(rows)} rows")
        return took_ns / 1e6


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


def main() -> None:
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    model: Model | None = None
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        op = asked.pop("op")
        if op == "load":
            model = Model(**asked)
            system = llama_cpp.llama_print_system_info().decode()
            answer: dict[str, Any] = {"about": f"llama-cpp-python {llama_cpp.__version__}; {system}"}
        else:
            assert model is not None, "load comes first"
            answer = {"ms": model.fill(0) if op == "prefill" else model.decode(asked["batch"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
