"""What `r3 eval` asks and who judges it: sets by name, files, and the task of a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3.config import Config
    from r3.evaluate.run import Benchmark
    from r3.samples import Query
    from r3.tasks.task import Prompting
    from r3.verify import Judge

PAPER_TASKS = "aime24,math500,amc23,minerva,olympiadbench"
EMBEDDED_TASK = "arithmetic"
ALL_TASKS = (
    *(EMBEDDED_TASK, "aime24", "aime25", "math500", "amc23", "amc", "minerva", "olympiadbench", "gsm8k-test"),
    *("hmmt25", "brumo25", "cmimc25"),
    *("mbpp", "humaneval", "mbpp-train", "mbpp-valid", "deepscaler", "math", "gsm8k"),
)
"""Every name that --tasks knows; spelt out here, so that --help need not load the sets."""
OWN_TASK = "task"
"""With a run: its own held-out problems, prompts and judge."""
JUDGES = ("math", "boxed", "code")


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A checkpoint of a run, and what the run was made with."""

    name: str
    step: int
    policy: Path
    config: Config

    @property
    def label(self) -> str:
        """What the checkpoint is called in tables."""
        return f"{self.name} step {self.step}"


def open_run(arguments: argparse.Namespace) -> TrainedRun | None:
    """The checkpoint that MODEL and --step name; None where MODEL is no run directory."""
    from r3.errors import ConfigError, RunError
    from r3.run import RunFiles

    files = RunFiles(arguments.model) if arguments.model is not None else None
    if files is None or not files.info_path.is_file():
        if arguments.step is not None:
            raise ConfigError("--step names a checkpoint of a run: give the run's directory as MODEL")
        return None
    from r3.config import validate
    from r3.tasks.settings import of_its_family
    from r3.train.resume import saved_settings

    saved = saved_settings(files, files.read_info())
    saved["task"] = _changed(of_its_family(saved["task"]), arguments)
    config = validate(saved)
    there = files.checkpoints.steps()
    latest = files.checkpoints.latest()
    step = arguments.step if arguments.step is not None else None if latest is None else latest.step
    if step not in there:
        kept = ", ".join(map(str, there)) or "none"
        raise RunError(f"{files.path}: no checkpoint of step {step}; there are {kept} (run.keep_checkpoints)")
    if (damage := files.checkpoints.damage(step)) is not None:
        raise RunError(f"{files.path}: the checkpoint of step {step} is damaged ({damage}); name another with --step")
    name = files.path.resolve().name
    return TrainedRun(name, step, files.checkpoints.folder / f"step-{step:06d}" / "policy", config)


def _changed(task: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The run's task with what the command line says otherwise."""
    given = {
        "question_column": arguments.question_column,
        "answer_column": arguments.answer_column,
        "system": arguments.system,
        "template": arguments.template,
        "verifier": arguments.judge,
    }
    changed = {**task, **{key: value for key, value in given.items() if value is not None}}
    if arguments.judge is not None:  # in place of the run's own rewards
        changed |= {"rewards": [], "outcome": None, "right_above": 0.5}
    if arguments.plain:
        changed["chat"] = False
    return changed


def prompting_of(arguments: argparse.Namespace, tokenizer: Any, run: TrainedRun | None) -> Prompting:
    """How sets and files are put to the model; a run's system prompt and chat options hold for them too."""
    from r3.errors import ConfigError
    from r3.tasks.settings import PromptedSettings
    from r3.tasks.task import INSTRUCTION, Prompting

    task = run.config.task if run is not None else None
    known = task.prompting if isinstance(task, PromptedSettings) else Prompting()
    chat = known.chat and not arguments.plain and bool(getattr(tokenizer, "chat_template", None))
    system = known.system if arguments.system is None else arguments.system
    if system and not chat:
        raise ConfigError("--system is for chats, and prompts are plain text here: put it into --template")
    boxed = arguments.judge is None or arguments.judge in JUDGES
    return Prompting(
        chat=chat,
        instruction=INSTRUCTION if boxed else "",
        system=system,
        template=arguments.template or "",
        chat_options=known.chat_options if chat else {},
    )


def grader(arguments: argparse.Namespace, run: TrainedRun | None) -> str:
    """What the verdicts depend on: the grader and its version, and what the files of the user's functions hold."""
    from r3 import __version__
    from r3.tasks.datasets import CODE
    from r3.verify.functions import digest_of_source

    named = arguments.judge or "math"
    judges = [named] if any(name not in (EMBEDDED_TASK, OWN_TASK, *CODE) for name in arguments.tasks) else []
    if OWN_TASK in arguments.tasks and arguments.judge is not None:
        judges = [named]
    judges += ["code"] if set(arguments.tasks) & set(CODE) and "code" not in judges else []
    judge = " and ".join(judges) or "the task's own"
    functions = [named] if "." in named else []
    if OWN_TASK in arguments.tasks and run is not None:
        functions += run.config.task.own_functions
    digests = {name: digest_of_source(name) for name in functions}
    sources = "".join(f", {name} {digest[:12]}" for name, digest in digests.items() if digest is not None)
    return f"{judge}, r3 {__version__}{sources}"


def benchmarks_of(
    arguments: argparse.Namespace, prompting: Prompting, stack: ExitStack, run: TrainedRun | None = None
) -> list[Benchmark]:
    """The tasks of the command line, cut down to the hard subset and the limit."""
    from r3.errors import TaskError
    from r3.evaluate.results import check_fresh, chosen, hard_subset
    from r3.evaluate.run import Benchmark
    from r3.tasks.datasets import CODE, SETS, Columns, load_file, load_set

    columns = Columns(question=arguments.question_column or "problem", answer=arguments.answer_column or "answer")
    benchmarks: list[Benchmark] = []
    judge: Judge | None = None
    code_judge: Judge | None = None
    for name in arguments.tasks:
        if name == EMBEDDED_TASK:
            benchmarks.append(_embedded_benchmark())
            continue
        if name == OWN_TASK and run is not None:
            benchmarks.append(_task_of(run, stack))
            continue
        if name not in SETS and not Path(name).suffix:
            own = "" if run is None else f", {OWN_TASK} (the run's own)"
            raise TaskError(f"--tasks: no set {name!r}; there are {', '.join(ALL_TASKS)}{own}, or the path of a file")
        title = SETS[name].title if name in SETS else Path(name).stem
        if name in CODE or arguments.judge == "code":
            code_judge = code_judge or _closed_by(stack, _code_judge(arguments.sandbox))
            benchmarks.append(Benchmark(name, title, _code(name, arguments, prompting), code_judge, extract=_no_vote))
            continue
        judge = judge or _closed_by(stack, _judge(arguments.judge or "math"))
        queries = (
            load_set(name, folder=arguments.data, prompting=prompting)
            if name in SETS
            else load_file(Path(name), columns=columns, prompting=prompting)
        )
        benchmarks.append(Benchmark(name, title, queries, judge))
    if arguments.hard_subset_from is not None:
        source = arguments.hard_subset_from
        if arguments.responses is None:
            check_fresh(source, arguments.model, arguments.seed)
        hard = chosen(hard_subset(source, arguments.hard_at_most), arguments.tasks, source)
        benchmarks = [
            _only(mark, [query for query in mark.queries if query.id in hard[mark.name]]) for mark in benchmarks
        ]
    return [_only(mark, mark.queries[: arguments.limit]) for mark in benchmarks]


def _closed_by(stack: ExitStack, judge: Judge) -> Judge:
    stack.callback(judge.close)
    return judge


def _task_of(run: TrainedRun, stack: ExitStack) -> Benchmark:
    """The held-out problems of a run under its own prompts and judge."""
    from r3.errors import TaskError
    from r3.evaluate.run import Benchmark, boxed_vote
    from r3.tasks import load_task
    from r3.tasks.settings import ArithmeticSettings, FileSettings, SandboxedSettings

    settings = run.config.task
    task = load_task(settings, run.config.run.seed)
    judge = _closed_by(stack, task.judge)
    if not task.heldout:
        raise TaskError(f"{run.name}: its task keeps no problems apart (task.heldout=0); name sets with --tasks")
    title = Path(settings.path).stem if isinstance(settings, FileSettings) else task.name
    kinds = {ArithmeticSettings: _after_mark, SandboxedSettings: _no_vote}
    extract = next((vote for kind, vote in kinds.items() if isinstance(settings, kind)), boxed_vote)
    return Benchmark(OWN_TASK, title, task.heldout, judge, extract=extract)


def _only(benchmark: Benchmark, queries: Sequence[Query]) -> Benchmark:
    from dataclasses import replace

    return replace(benchmark, queries=queries)


def _embedded_benchmark() -> Benchmark:
    from r3.config import load_config
    from r3.evaluate.run import Benchmark
    from r3.tasks import load_task

    task = load_task(load_config(None).task, seed=0)

    return Benchmark(EMBEDDED_TASK, "Arithmetic", task.heldout, task.judge, extract=_after_mark)


def _after_mark(text: str) -> str | None:
    _, mark, answer = text.rpartition("#")
    return answer.strip() if mark else None


def _code(name: str, arguments: argparse.Namespace, prompting: Prompting) -> Sequence[Query]:
    """Problems of code, with the instruction of the code task in place of that for maths."""
    from dataclasses import replace

    from r3.tasks.code import load_code
    from r3.tasks.settings import CodeSettings

    instruction = CodeSettings.model_fields["instruction"].default
    return load_code(name, replace(prompting, instruction=instruction), arguments.data)


def _no_vote(_: str) -> None:
    """Programs are not counted for a majority: those that do the same are seldom the same text."""


def _code_judge(walls: Any) -> Judge:
    from r3.verify.code import CodeVerifier
    from r3.verify.sandbox import SandboxSettings

    verifier = CodeVerifier(SandboxSettings(walls=walls))
    verifier.start()  # a machine that cannot isolate code is found out before answers are drawn
    return verifier


def _judge(name: str) -> Judge:
    """The judge of that name, or a function by its dotted path."""
    from r3.tasks.files import boxed_verdict
    from r3.verify import FunctionJudge, MathVerifier
    from r3.verify.functions import importable
    from r3.verify.judge import PlainJudge

    if name in JUDGES:
        return PlainJudge(boxed_verdict) if name == "boxed" else MathVerifier()
    importable([Path.cwd()])
    return FunctionJudge(name, setting="caged: true in a recipe's task.rewards")
