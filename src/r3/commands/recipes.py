"""`r3 recipes`: the recipes that come with r3."""

from __future__ import annotations

import argparse
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "recipes", PACKAGE.parents[1] / "recipes")
"""In an installed package, and in a clone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `r3 recipes`."""
    parser.set_defaults(run=_list)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    listing = actions.add_parser("list", help="which there are (the default)", description="which there are")
    listing.set_defaults(run=_list)
    text = "copy recipes into a folder, to run and to change them"
    copying = actions.add_parser("copy", help=text, description=text)
    copying.add_argument("names", nargs="+", metavar="NAME", help="as r3 recipes lists them")
    copying.add_argument("--to", type=Path, default=Path("recipes"), metavar="DIR", help="where to (recipes/)")
    copying.set_defaults(run=_copy)


def recipes() -> dict[str, Path]:
    """Every recipe by its name."""
    from r3.errors import RunError

    folder = next((folder for folder in FOLDERS if folder.is_dir()), None)
    if folder is None:
        raise RunError(f"{FOLDERS[0]}: the recipes are missing; install r3 again")
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _list(arguments: argparse.Namespace) -> int:
    named = recipes()
    width = max(map(len, named))
    for name, path in named.items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        print(f"{name:{width}}  {first.removeprefix('#').strip()}")
    return 0


def _copy(arguments: argparse.Namespace) -> int:
    import difflib

    from r3.errors import ConfigError

    named = recipes()
    for name in arguments.names:
        if name not in named:
            near = difflib.get_close_matches(name, named, n=1)
            raise ConfigError(
                f"no recipe {name!r}; " + (f"did you mean {near[0]}?" if near else "r3 recipes lists them")
            )
        if (arguments.to / f"{name}.yaml").exists():
            raise ConfigError(f"{arguments.to / f'{name}.yaml'} is there already; give another --to")
    arguments.to.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        copy = arguments.to / f"{name}.yaml"
        copy.write_bytes(named[name].read_bytes())
        print(f"{copy}: run it with r3 {'sft' if name.startswith('sft-') else 'train'} {copy}")
    return 0
