"""The judge of code on answers as models write them, in the forms that the common test sets have."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from r3.samples import Query
from r3.verify import Verdict, VerifierError
from r3.verify.code import CodeVerifier, code_of
from r3.verify.sandbox import SandboxSettings

DATA = os.environ.get("R3_DATA")
SETS = {"train_mbpp": 374, "valid_mbpp": 90, "eval_mbpp": 500, "eval_humaneval": 164}
DOUBLE = {"id": "d", "tests": ["assert double(2) == 4", "assert double('a') == 'aa'"]}


def judged(verifier: CodeVerifier, answer: str, columns: dict[str, Any], *, truncated: bool = False) -> Verdict:
    return verifier.judge(Query("q", "?", columns=columns), answer, truncated=truncated)


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    with CodeVerifier(SandboxSettings(workers=2)) as one:
        yield one


def fenced(code: str) -> str:
    return f"Here is the function:\n\n```python\n{code}\n```\n\nIt doubles."


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (fenced("def double(x):\n    return 2 * x"), True),
        ("def double(x):\n    return 2 * x", True),
        (fenced("def double(x):\n    return x") + fenced("def double(x):\n    return x * 2"), True),
        (fenced("def double(x):\n    return x * 2") + fenced("def double(x):\n    return x"), False),
        (fenced("def double(x):\n    return x * 2") + "\n```text\n4\n```", True),
        (fenced("def double(x):\n    return x * 2") + "\n```\n>>> double(2)\n4\n```", False),  # no language: it is code
        ("```py\r\ndef double(x):\r\n    return x * 2\r\n```", True),
        ("  ```python\n  def double(x):\n      return x * 2\n  ```", False),  # indented code is no program
        ("```python\ndef double(x):\n    return x * 2", True),  # never closed
        ("```python\ndef double(x):\n    '''as in\n    ```x```\n    '''\n    return x * 2\n```", True),
        ("I cannot do this.", False),
        ("", False),
        ("```python\n```", False),
    ],
)
def test_which_code_counts(verifier: CodeVerifier, answer: str, right: bool) -> None:
    assert judged(verifier, answer, columns=DOUBLE).right is right


def test_the_reason_names_the_test_and_what_it_got(verifier: CodeVerifier) -> None:
    verdict = judged(verifier, "def double(x):\n    print('half of', 4)\n    return 4", columns=DOUBLE)
    assert verdict.reason == "fail"
    assert verdict.feedback == (
        "Test 2 of 2 fails:\nassert double('a') == 'aa'\nIt got 4\nIt printed:\nhalf of 4\nhalf of 4"
    )
    verdict = judged(verifier, "def double(x):\n    y = 1\n    return x[y]", columns=DOUBLE)
    assert verdict.reason == "exception"
    assert verdict.feedback == (
        "Test 1 of 2 fails:\nassert double(2) == 4\nTypeError: 'int' object is not subscriptable\nline 3: return x[y]"
    )
    assert judged(verifier, "def double(x:", columns=DOUBLE).reason == "syntax"
    assert judged(verifier, "", columns=DOUBLE).reason == "no code"
    assert judged(verifier, "x" * 200_000, columns=DOUBLE).reason == "too long"
    assert judged(verifier, "x", columns=DOUBLE, truncated=True).reason == "truncated"


def test_the_feedback_is_short(verifier: CodeVerifier) -> None:
    rows = {"tests": [f"assert double({'1' * 5000!r}) == 0"]}
    code = "def double(x):\n    for i in range(999): print('line', 'y' * 500)\n    return 'z' * 9999"
    verdict = judged(verifier, code, columns=rows)
    assert 400 < len(verdict.feedback) < 1_200
    assert "…" in verdict.feedback


def test_a_graded_verdict_has_the_share_of_tests() -> None:
    rows = {"tests": [f"assert f({i}) == {i}" for i in range(4)]}
    with CodeVerifier(SandboxSettings(workers=1, seconds=2), graded=True) as verifier:

        def share(answer: str, columns: dict[str, Any] = rows) -> float:
            scores = judged(verifier, answer, columns).scores
            assert scores is not None
            assert scores["correct"] == 0
            return scores["tests"]

        assert judged(verifier, "def f(x): return x", rows).scores is None  # right: worth what any right answer is
        assert share("def f(x): return min(x, 2)") == 0.75
        half = judged(verifier, "def f(x): return x if x % 2 else 1 / 0", rows)
        assert (half.right, half.scores) == (False, {"correct": 0.0, "tests": 0.5})
        assert half.feedback.startswith("Test 1 of 4 fails:")
        loops = judged(verifier, "def f(x):\n    while x == 1: pass\n    return x", rows)
        assert (loops.reason, loops.scores) == ("timeout", {"correct": 0.0, "tests": 0.25})
        assert share("def f(x:") == 0.0
        programs = {"tests": [{"input": str(i), "output": str(min(i, 2))} for i in range(4)]}
        assert share("print(input())", programs) == 0.75


CHECK = """
METADATA = {'author': 'x'}

def check(candidate):
    assert candidate([1.0, 2.0]) == 1.5
    assert abs(candidate([1, 2, 3.3]) - 2.1) < 1e-6, "message"
    for n in range(1, 5):
        assert candidate(list(range(n))) == (n - 1) / 2

check(mean)
"""
MEAN = {
    "id": "m",
    "problem": 'from typing import List\n\n\ndef mean(xs: List[float]) -> float:\n    """ The mean. """\n',
    "entry_point": "mean",
    "tests": [CHECK],
}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def mean(xs):\n    return sum(xs) / len(xs)", "pass"),
        ("def mean(xs: List[float]) -> float:\n    return sum(xs) / len(xs)", "pass"),  # the problem imports List
        ("    return sum(xs) / len(xs)", "pass"),  # only the body
        ("def mean(xs):\n    return sum(xs) // len(xs)", "fail"),
        ("def abs(x): return 0\ndef mean(xs):\n    return 1.5", "fail"),  # it is not asked for abs
        ("def average(xs):\n    return 1.5", "fail"),  # the problem's own function does nothing
        ("class Number(float):\n    __sub__ = __rsub__ = lambda s, o: 0\ndef mean(xs): return Number(1.5)", "fail"),
    ],
)
def test_check_functions(verifier: CodeVerifier, code: str, reason: str) -> None:
    assert judged(verifier, fenced(code), columns=MEAN).reason == reason


def test_a_failing_check_names_its_line(verifier: CodeVerifier) -> None:
    feedback = judged(verifier, "def mean(xs):\n    return 1.5", columns=MEAN).feedback
    assert feedback == (
        'The test fails:\nassert abs(candidate([1, 2, 3.3]) - 2.1) < 1e-6, "message"\nIt got 0.6000000000000001'
    )


def test_helpers_of_the_problem_are_not_the_answers(verifier: CodeVerifier) -> None:
    """What a test computes with the problem's own helper, an answer that redefines the helper cannot change."""
    row = {
        "problem": "def encode(s):\n    return s[::-1] + '.'\n\ndef decode(s):\n    '''undo encode'''\n",
        "entry_point": "decode",
        "tests": ["def check(f):\n    for s in ('ab', 'xyz'):\n        assert f(encode(s)) == s\ncheck(decode)"],
    }
    assert judged(verifier, "def decode(s):\n    return s[:-1][::-1]", columns=row).right
    assert judged(verifier, "def encode(s): return s\ndef decode(s): return s", columns=row).reason == "fail"


@pytest.mark.parametrize(
    ("tests", "code", "right"),
    [
        (["assert sum(10, 15) == 25"], "def sum(a, b): return a + b", True),  # named like a built-in function
        (["assert int(f(2)) == 3"], "def f(x): return 3.7", True),
        (["assert int(f(2)) == 3"], "def int(x): return 3\ndef f(x): return 4", False),
        (["assert f([1], int) == int"], "def f(x, kind): return kind", True),
        (["assert f(1) == sys.getsizeof(1)"], "import sys\ndef f(x): return sys.getsizeof(x)", True),
        (["assert f(1) == sys.getsizeof(1)"], "class sys: getsizeof = lambda x: 0\ndef f(x): return 0", False),
        (["assert math.isclose(f(2), 2 ** 0.5)"], "def f(x): return x ** 0.5", True),
        (["import math\nassert math.isclose(f(2), 2 ** 0.5)"], "class math: isclose = abs\ndef f(x): return 9", False),
        (["x = [3, 1]\nf(x)\nassert x == [1, 3]"], "def f(x): x.sort()", True),  # in place
        (["x = {1}\nf(x)\nassert x == {1, 2}"], "def f(x): x.add(2)", True),
        (["assert list(f(3)) == [0, 1, 2]"], "def f(n):\n    yield from range(n)", True),
        (["assert f(3) == [0, 1, 2]"], "def f(n):\n    yield from range(n)", False),
        (["assert f(2 ** 200) == 2 ** 400"], "def f(n): return n * n", True),
        (["assert f() == (1, 'a', None, {2: [b'x', {3}]})"], "def f(): return 1, 'a', None, {2: [b'x', {3}]}", True),
        (["assert f() == [1]"], "def f(): return (1,)", False),  # a tuple is no list
        (["assert f('aab') == {'a': 2, 'b': 1}"], "from collections import Counter as f", True),
        (["assert f(a=1, *[2], **{'c': 3}) == 6"], "def f(b, a, c): return a + b + c", True),
        (["try:\n    f(0)\n    assert False\nexcept ZeroDivisionError:\n    pass"], "def f(x): return 1 / x", True),
        (["assert all(map(f, [1, 2]))"], "def f(x): raise StopIteration", False),
        (["try:\n    f(0)\nexcept BaseException:\n    pass"], "import os\ndef f(x): os._exit(0)", False),
        (["assert f(S(2)) == 4"], "class S:\n    def __init__(s, a): s.a = a\ndef f(s): return s.a ** 2", True),
        (["assert not f(1)"], "class E:\n    def __bool__(self): return False\ndef f(x): return E()", False),
        (["assert f(1) != 1"], "class E: pass\ndef f(x): return E()", False),
    ],
)  # fmt: skip
def test_what_tests_may_ask(verifier: CodeVerifier, tests: list[str], code: str, right: bool) -> None:
    verdict = judged(verifier, code, columns={"tests": tests})
    assert verdict.right is right, verdict


def test_setup_runs_between_the_answer_and_the_tests(verifier: CodeVerifier) -> None:
    row = {
        "setup": "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)",
        "tests": ["assert height(root) == 3", "assert height(root.left) == 2"],
    }
    node = "class Node:\n    def __init__(self, v):\n        self.v, self.left = v, None\n"
    assert judged(
        verifier, node + "def height(n):\n    return 0 if n is None else 1 + height(n.left)", columns=row
    ).right
    assert judged(verifier, node + "def height(n):\n    return 3", columns=row).reason == "fail"
    broken = judged(verifier, "def height(n): return 3", columns=row)
    assert broken.feedback.startswith("The tests' set-up fails:\nroot = Node(1)\nNameError")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", "pass"),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), end='  \\n\\n')", "pass"),
        ("def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()", "pass"),
        ("print(sum(map(int, open(0).read().split())))\nexit()", "pass"),
        ("import os\nprint(sum(map(int, input().split())), flush=True)\nos._exit(0)", "pass"),
        ("import threading as t\nt.Thread(target=lambda: print(eval(input().replace(' ', '+')))).start()", "pass"),
        ("import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))\nraise SystemExit", "pass"),
        ("print(3)", "fail"),
        ("print(sum(map(int, input().split())))\n1 / 0", "exception"),
        ("input()\ninput()\nprint(3)", "exception"),
    ],
)  # fmt: skip
def test_programs(verifier: CodeVerifier, code: str, reason: str) -> None:
    tests = [{"input": "1 2\n", "output": "3\n"}, {"input": "40 2\n", "output": "42"}]
    assert judged(verifier, fenced(code), columns={"tests": tests}).reason == reason


def test_each_run_of_a_program_is_new(verifier: CodeVerifier) -> None:
    code = "import os\nprint(input(), os.path.exists('seen'))\nopen('seen', 'w').close()"
    tests = [{"input": str(i), "output": f"{i} False"} for i in range(60)]  # more than run in one go
    assert judged(verifier, code, columns={"tests": tests}).right


@pytest.mark.parametrize(
    ("columns", "fix"),
    [
        ({"id": "q7"}, "row q7: the judge of code needs a column tests"),
        ({"id": "q7", "tests": []}, "at least one test"),
        ({"id": "q7", "tests": "assert f() == 1"}, "a list"),
        ({"id": "q7", "tests": ["assert f()", {"input": "1", "output": "2"}]}, "every test"),
        ({"id": "q7", "tests": [{"input": "1"}]}, "input and output"),
    ],
)
def test_a_row_that_cannot_be_judged_is_an_error(verifier: CodeVerifier, columns: dict[str, Any], fix: str) -> None:
    with pytest.raises(VerifierError, match=fix):
        judged(verifier, "x = 1", columns=columns)


def test_tests_that_are_no_python_are_a_reason_of_their_own(verifier: CodeVerifier) -> None:
    assert judged(verifier, "x = 1", columns={"tests": ["assert ("]}).reason == "bad test"


def test_many_at_once() -> None:
    with CodeVerifier(SandboxSettings(workers=2)) as verifier, ThreadPoolExecutor(8) as threads:
        answers = [f"def double(x): return x * {2 + i % 2}" for i in range(20)]
        verdicts = list(threads.map(lambda answer: judged(verifier, answer, DOUBLE), answers))
        assert [verdict.reason for verdict in verdicts] == ["pass", "fail"] * 10
        again = pickle.loads(pickle.dumps(verifier))
        assert judged(again, "def double(x): return 2 * x", DOUBLE).right
        again.close()


def test_fences_are_read_line_by_line() -> None:
    assert code_of("a ``` b") == "a ``` b"
    assert code_of("```js\nx\n```") == "```js\nx\n```"
    assert code_of("````python\nx\n```") == "````python\nx\n```"


@pytest.mark.skipif(DATA is None, reason="set R3_DATA to the folder with MBPP and HumanEval")
@pytest.mark.parametrize("name", SETS)
def test_every_reference_passes_its_own_tests(name: str) -> None:
    rows = [json.loads(line) for line in (Path(str(DATA)) / f"{name}.jsonl").read_text().splitlines()]
    with CodeVerifier(SandboxSettings(workers=2, seconds=20)) as verifier, ThreadPoolExecutor(2) as threads:
        verdicts = list(threads.map(lambda row: judged(verifier, fenced(row["reference"]), row), rows))
    assert len(verdicts) == SETS[name]
    assert {row["id"]: verdict for row, verdict in zip(rows, verdicts, strict=True) if not verdict.right} == {}
