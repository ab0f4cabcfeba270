"""ISR: who is hard, and prompts that keep the question whole and the budget, with real tokenizers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.method.reflection import (
    ReflectionPrompt,
    is_hard,
    plain_prompt,
    reflect,
    reflection_prompt,
    shortened,
    why_not_hard,
)
from r3.method.settings import ReflectionSettings
from r3.samples import Message, Query
from tests.method.makers import make_sample
from tests.tokenizing import char_tokenizer, chat_tokenizer

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<|>\x00"), min_size=1, max_size=60)
ATTEMPT = st.text(st.sampled_from("0123456789 +=\n{}\\é漢🙂question"), min_size=1, max_size=400)


@pytest.mark.parametrize(
    ("past", "epoch", "reason"),
    [
        (0.0, 1, "early"),
        (0.0, 2, None),
        (0.2499, 2, None),
        (0.25, 2, "not_hard"),  # strictly below τ
        (1.0, 9, "not_hard"),
        (None, 2, "never_tried"),
        (float("nan"), 2, "never_tried"),
    ],
)
def test_hard_query_test(past: float | None, epoch: int, reason: str | None) -> None:
    settings = ReflectionSettings(tau=0.25)
    assert why_not_hard(past, epoch, settings) == reason
    assert is_hard(past, epoch, settings) == (reason is None)
    assert why_not_hard(past, epoch, ReflectionSettings(enabled=False)) == "off"


@given(TEXT, ATTEMPT, st.integers(8, 300))
def test_chat_prompts_keep_the_question_and_the_budget(question: str, attempt: str, budget: int) -> None:
    tokenizer = chat_tokenizer()
    query = Query("q", (Message("system", "Be brief."), Message("user", question)))
    settings = ReflectionSettings(max_prompt_tokens=budget)
    prompt = reflection_prompt(query, tokenizer.encode(attempt), tokenizer, settings)
    bare = reflection_prompt(query, [], tokenizer, ReflectionSettings(max_prompt_tokens=10**6, cut_marker="[…]"))
    assert bare is not None
    if prompt is None:  # only where the question with nothing shown does not fit either (up to the marker's tokens)
        assert len(bare) + 12 > budget
        return
    assert len(prompt) <= budget
    text = tokenizer.decode(prompt)
    assert question in text
    assert "Be brief." in text
    assert settings.guidance in text
    assert text.endswith("<|assistant|>")


@given(st.text(st.sampled_from("0123456789+="), min_size=1, max_size=30), ATTEMPT, st.integers(8, 200))
def test_plain_text_prompts_keep_the_question_and_the_budget(question: str, attempt: str, budget: int) -> None:
    tokenizer = char_tokenizer()
    settings = ReflectionSettings(
        template="{question}\nwrong: {attempt}\nretry:", cut_marker="...", max_prompt_tokens=budget
    )
    prompt = reflection_prompt(Query("q", question), tokenizer.encode(attempt), tokenizer, settings)
    if prompt is None:
        assert len(question) + len("\nwrong: ...\nretry:") > budget
        return
    assert len(prompt) <= budget
    text = tokenizer.decode(prompt)
    assert text.startswith(question + "\nwrong: ")
    assert text.endswith("\nretry:")


def test_a_long_attempt_keeps_its_ends_and_uses_the_budget() -> None:
    tokenizer = char_tokenizer()
    attempt = "START" + "x" * 1000 + "END"
    settings = ReflectionSettings(template="{question}|{attempt}|", cut_marker="...", max_prompt_tokens=60)
    prompt = reflection_prompt(Query("q", "1+1="), tokenizer.encode(attempt), tokenizer, settings)
    assert prompt is not None
    text = tokenizer.decode(prompt)
    assert text.startswith("1+1=|STARTx")
    assert text.endswith("xEND|")
    assert "x...x" in text
    assert len(prompt) == 60  # nothing of the budget is wasted


def test_a_fitting_attempt_is_shown_whole() -> None:
    tokenizer = char_tokenizer()
    settings = ReflectionSettings(template="{question}|{attempt}|", cut_marker="...", max_prompt_tokens=60)
    prompt = reflection_prompt(Query("q", "1+1="), tokenizer.encode("1+1=3"), tokenizer, settings)
    assert tokenizer.decode(prompt) == "1+1=|1+1=3|"


def test_a_cut_inside_a_character_leaves_no_broken_character() -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer.encode("漢字" * 20)  # three byte tokens a character
    for kept in range(len(ids)):
        assert "\ufffd" not in shortened(ids, kept, tokenizer, "…")


def test_model_text_cannot_fill_the_template() -> None:
    tokenizer = char_tokenizer()
    settings = ReflectionSettings(template="Q {question} A {attempt} G {guidance}", guidance="retry")
    attempt = r"{question} {guidance} \boxed{0}"
    prompt = reflection_prompt(Query("q", r"\frac{1}{2}"), tokenizer.encode(attempt), tokenizer, settings)
    assert tokenizer.decode(prompt) == rf"Q \frac{{1}}{{2}} A {attempt} G retry"


def test_the_shown_failure_is_drawn_at_random_from_the_wrong_ones_and_recorded() -> None:
    tokenizer = char_tokenizer()
    past = [
        make_sample(i == 3, tokens=tokenizer.encode(f"answer {i}"), id=i, finish="length" if i == 1 else "stop")
        for i in range(5)
    ]
    shown = set()
    for seed in range(80):
        reflection = reflect(Query("q", "1+1="), past, tokenizer, ReflectionSettings(), rng=np.random.default_rng(seed))
        assert isinstance(reflection, ReflectionPrompt)
        assert isinstance(reflection.text, str)
        assert f"answer {reflection.context.shown}" in reflection.text
        assert reflection.tokens.tolist() == tokenizer.encode(reflection.text)
        shown.add(reflection.context.shown)
    assert shown == {0, 1, 2, 4}


def test_no_failure_and_no_room_are_said() -> None:
    tokenizer = char_tokenizer()
    rng = np.random.default_rng(0)
    query = Query("q", "1+1=")
    assert reflect(query, [make_sample(True)], tokenizer, ReflectionSettings(), rng=rng) == "no_failure"
    small = ReflectionSettings(max_prompt_tokens=10)
    assert reflect(query, [make_sample(False)], tokenizer, small, rng=rng) == "too_long"
    with pytest.raises(ValueError, match="query 'other'"):
        reflect(query, [make_sample(False, query_id="other")], tokenizer, ReflectionSettings(), rng=rng)


def test_a_chat_without_a_user_turn_is_refused() -> None:
    query = Query("q", (Message("system", "hi"),))
    with pytest.raises(ValueError, match="without a user turn"):
        reflection_prompt(query, [5], chat_tokenizer(), ReflectionSettings())


def test_plain_prompts_go_through_the_template_or_stay_text() -> None:
    chat = chat_tokenizer()
    assert chat.decode(plain_prompt(Query("q", (Message("user", "2+2"),)), chat)) == "<|user|>2+2<|end|><|assistant|>"
    chars = char_tokenizer()
    assert chars.decode(plain_prompt(Query("q", "2+2="), chars)) == "2+2="


@pytest.mark.parametrize("template", ["no places", "{question} only", "{question}{attempt}{attempt}"])
def test_a_template_without_its_places_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="exactly once"):
        ReflectionSettings(template=template)


def test_feedback_on_the_shown_attempt_is_filled_in_where_the_template_asks_for_it() -> None:
    tokenizer, rng = char_tokenizer(), np.random.default_rng(0)
    settings = ReflectionSettings(template="{question}|{attempt}|{feedback}|", max_prompt_tokens=200)
    for verdict, shown in (("fail\nassert f(1) == 2\nIt got 3", "assert f(1) == 2\nIt got 3"), ("no box", "no box")):
        failure = make_sample(tokens=tokenizer.encode("def {feedback}"), verdict=verdict)
        made = reflect(Query("q", "f?"), [failure], tokenizer, settings, rng=rng)
        assert isinstance(made, ReflectionPrompt)
        assert made.text == f"f?|def {{feedback}}|{shown}|"
