"""SmolLM2's GGUF file, read by transformers and saved as a directory: our two readers agree bit for bit."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from reference_server.gguf_weights import read_gguf
from reference_server.model_store import fetch_smollm2
from reference_server.safetensors_weights import read_safetensors

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    # transformers and its GGUF reader warn about their own affairs.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def save_as_directory(gguf: Path, directory: Path) -> None:
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # What came from a quantized file refuses to be saved; the same weights in a model of their own do not.
    plain = {key: value for key, value in source.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig.from_dict(plain))
    model.load_state_dict(source.state_dict())
    model.save_pretrained(directory, max_shard_size="200MB")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


def test_both_readers_give_the_same_model(tmp_path: Path) -> None:
    gguf = fetch_smollm2()
    save_as_directory(gguf, tmp_path)
    expected, read = read_gguf(gguf), read_safetensors(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert read.config == expected.config
    assert read.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        assert torch.equal(read.state[name], tensor), name
    ours, theirs = read.tokenizer, expected.tokenizer
    assert (ours.tokens, ours.merges, ours.control_ids) == (theirs.tokens, theirs.merges, theirs.control_ids)
    assert (ours.bos_id, ours.eos_ids, ours.add_bos) == (theirs.bos_id, theirs.eos_ids, theirs.add_bos)
    assert ours.chat_template == theirs.chat_template
    # transformers writes GPT-2's rule for every GGUF file, whatever the file says.
    assert (ours.pre, theirs.pre) == ("gpt-2", "smollm")
