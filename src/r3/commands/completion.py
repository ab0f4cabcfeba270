"""`r3 completion`: completion of commands, options and settings for bash, zsh and fish."""

from __future__ import annotations

import argparse

SCRIPT = """\
# Completion of r3; in ~/.bashrc: eval "$(r3 completion bash)", in ~/.zshrc: eval "$(r3 completion zsh)"
_r3() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
  if [[ $COMP_CWORD == 1 ]]; then
    words="{commands}"
  else
    case "$command" in
{cases}
    esac
  fi
  if [[ $word == *=* || $word == = ]]; then return; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [[ ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -o default -F _r3 r3
"""
FISH = """\
# Completion of r3; in ~/.config/fish/config.fish: r3 completion fish | source
complete -c r3 -n __fish_use_subcommand -f -a "{commands}"
{cases}
"""
WITH_SETTINGS = ("train", "sft", "compare", "data")
"""Commands that take key=value settings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The one argument of `r3 completion`."""
    parser.epilog = 'eval "$(r3 completion bash)" in ~/.bashrc, or with zsh in ~/.zshrc; r3 completion fish | source'
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="which shell")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script; returns the exit code."""
    from r3.cli import parser

    commands = _commands(parser())
    words = {name: _words(name, command) for name, command in commands.items()}
    if arguments.shell == "fish":
        print(FISH.format(commands=" ".join(commands), cases="\n".join(_fish(words))), end="")
        return 0
    cases = [f'      {name}) words="{" ".join(known)}" ;;' for name, known in words.items()]
    if arguments.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(SCRIPT.format(commands=" ".join(commands), cases="\n".join(cases)), end="")
    return 0


def _words(name: str, command: argparse.ArgumentParser) -> list[str]:
    """All that may stand behind a command: its options, its actions and theirs, and settings."""
    words = [*_options(command), *_commands(command)]
    for action in _commands(command).values():
        words += _options(action)
    return list(dict.fromkeys(words + _settings() if name in WITH_SETTINGS else words))


def _fish(words: dict[str, list[str]]) -> list[str]:
    """A line for each command's words, and one for its options."""
    lines = []
    for name, known in words.items():
        line = f'complete -c r3 -n "__fish_seen_subcommand_from {name}"'
        others = [word for word in known if not word.startswith("--")]
        lines += [f'{line} -a "{" ".join(others)}"'] if others else []
        options = " ".join(f"-l {word.removeprefix('--')}" for word in known if word.startswith("--"))
        lines += [f"{line} {options}"] if options else []
    return lines


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The subcommands of a parser, where it has any."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]


def _settings() -> list[str]:
    """Every setting of every family of tasks, as `key=`."""
    from r3.config import Config
    from r3.config_text import all_keys

    return sorted({f"{key}=" for key in all_keys(Config)})
