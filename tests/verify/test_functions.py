"""Any function as a verifier, in process and caged."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from r3.verify import Case, FunctionVerifier, Verdict, VerifierError

JUDGES = "tests.verify.judges"


@pytest.mark.parametrize("caged", [False, True])
@pytest.mark.parametrize("name", ["equal", "equal_later"])
def test_sync_and_async_functions_give_verdicts_in_order(name: str, caged: bool) -> None:
    with FunctionVerifier(f"{JUDGES}.{name}", caged=caged) as verifier:
        verdicts = verifier.verify_many([("a", "a"), ("b", "a"), Case("a", "a", truncated=True)])
        assert [(v.right, v.reason) for v in verdicts] == [(True, "match"), (False, "different"), (False, "truncated")]
        assert verifier.counts() == {"match": 1, "different": 1, "truncated": 1}


def test_an_async_judge_runs_inside_an_event_loop_too() -> None:
    async def ask() -> Verdict:
        return FunctionVerifier(f"{JUDGES}.equal_later").verify("a", "a")

    assert asyncio.run(ask()).right


@pytest.mark.parametrize("caged", [False, True])
def test_columns_reach_the_function_by_name(caged: bool) -> None:
    with FunctionVerifier(f"{JUDGES}.bonus", caged=caged, threshold=0.8) as verifier:
        assert verifier.verify("", columns={"bonus": 0.9}).right
        assert not verifier.verify("", columns={"bonus": 0.7}).right
        assert verifier.verify("", columns={"bonus": float("nan")}).reason == "not a number"


def test_the_cage_holds_a_bad_judge() -> None:
    acts = ["fine", "hang", "raise", "segfault", "bloat", "fine"]
    with FunctionVerifier(f"{JUDGES}.act", caged=True, seconds=0.3, memory_mb=512) as verifier:
        reasons = [verdict.reason for verdict in verifier.verify_many([(act, "") for act in acts])]
        assert reasons == ["match", "timeout", "error", "crashed", "memory", "match"]
        assert verifier.verify("read", "").reason == "error"  # a text is no verdict


def test_a_bad_judge_in_process_is_the_callers_to_handle() -> None:
    with pytest.raises(LookupError, match="no such thing"):
        FunctionVerifier(f"{JUDGES}.act").verify("raise")
    with pytest.raises(VerifierError, match="float or a bool"):
        FunctionVerifier(f"{JUDGES}.nothing").verify("")


@pytest.mark.parametrize("dotted", ["nodots", f"{JUDGES}.nobody", "no.such.module", f"{JUDGES}._ACTS"])
def test_a_path_to_no_function_is_refused_with_the_fix(dotted: str) -> None:
    with pytest.raises(VerifierError, match=r"package\.module\.function"):
        FunctionVerifier(dotted)


def test_it_travels_to_other_processes() -> None:
    with pickle.loads(pickle.dumps(FunctionVerifier(f"{JUDGES}.equal", caged=True))) as verifier:
        assert verifier.caged
        assert verifier.verify("a", "a").right
