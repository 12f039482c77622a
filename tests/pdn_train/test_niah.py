"""Prompts as RULER makes them: the needle where and how it should be, the length as full as it can be, the same ones for a seed."""

import re

import pytest

from pdn_train import niah
from pdn_train.niah import NOISE, NiahError, prompts
from pdn_train.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer)


@pytest.fixture(scope="module")
def prose(documents) -> str:
    return "\n".join(documents)


def taken_apart(text: str) -> tuple[str, str, str, str]:
    """(kind, context, key, value) of a prompt's text; the question must ask for the needle's key."""
    found = re.fullmatch(
        r"A special magic (\w+) is hidden within the following text\. Make sure to memorize it\. "
        r"I will quiz you about the \1 afterwards\.\n"
        r"(.*)\nWhat is the special magic \1 for (\S+) mentioned in the provided text\?"
        r" The special magic \1 for \3 mentioned in the provided text is",
        text,
        re.S,
    )
    kind, context, key = found.groups()
    needles = re.findall(rf"One of the special magic {kind}s for {key} is: (\S+)\.", context)
    assert len(needles) == 1
    return kind, context, key, needles[0]


@pytest.mark.parametrize("variant", ["niah_1", "niah_2", "niah_3"])
def test_a_prompt_is_as_published(variant, tokenizer, prose):
    made = prompts(variant, 700, 10, tokenizer, 0, prose)
    for prompt in made:
        kind, context, key, value = taken_apart(tokenizer.decode(prompt.ids))
        assert value == prompt.answer and re.fullmatch(r"[a-z]+-[a-z]+", key)
        if variant == "niah_3":
            assert kind == "uuid" and re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", value)
        else:
            assert kind == "number" and re.fullmatch(r"[1-9]\d{6}", value)
        rest = re.sub(rf"\s*One of the special magic {kind}s for {key} is: {value}\.", "", context)
        if variant == "niah_1":
            assert set(rest.strip().split("\n")) == {NOISE}
        else:
            assert re.sub(r"\s+", " ", rest).strip() in re.sub(r"\s+", " ", prose)
    assert len({prompt.answer for prompt in made}) == 10


def test_the_needle_stands_everywhere(tokenizer, prose):
    for variant in ("niah_1", "niah_2"):
        contexts = [taken_apart(tokenizer.decode(p.ids))[1] for p in prompts(variant, 700, 40, tokenizer, 1, prose)]
        depths = [text.index("One of the special") / len(text) for text in contexts]
        assert min(depths) < 0.15 and max(depths) > 0.7 and len({round(d, 1) for d in depths}) >= 5


@pytest.mark.parametrize("variant, slack", [("niah_1", 60), ("niah_2", 25)])
def test_the_text_is_as_long_as_it_can_be(variant, slack, tokenizer, prose):
    for length in (600, 1200):
        for prompt in prompts(variant, length, 5, tokenizer, 0, prose):
            assert length - 128 - slack < len(prompt.ids) <= length - 128


def test_the_seed_decides(tokenizer, prose):
    first, again, other = (prompts("niah_2", 700, 3, tokenizer, seed, prose) for seed in (5, 5, 6))
    assert first == again and [p.answer for p in first] != [p.answer for p in other]
    assert prompts("niah_2", 700, 5, tokenizer, 5, prose)[:3] == first


def test_prose_that_is_short_is_repeated(tokenizer):
    context = taken_apart(tokenizer.decode(prompts("niah_2", 500, 1, tokenizer, 0, "It was so. It is good.")[0].ids))[1]
    assert context.count("It was so.") > 3


@pytest.mark.parametrize("variant", ["niah_1", "niah_3"])
def test_a_length_without_room_is_refused_with_the_smallest_that_has_some(variant, tokenizer, prose):
    with pytest.raises(NiahError) as caught:
        prompts(variant, 200, 20, tokenizer, 0, prose)
    said = re.match(rf"{variant} needs a length of at least (\d+) tokens, 128 of them .*, not 200: set --lengths so", str(caught.value))
    fits = int(said[1])
    assert all(len(prompt.ids) <= fits - 128 for prompt in prompts(variant, fits, 20, tokenizer, 0, prose))
    with pytest.raises(NiahError, match=f"not {fits - 2}: "):
        prompts(variant, fits - 2, 20, tokenizer, 0, prose)


def test_the_score_is_the_share_that_holds_the_answer(monkeypatch, tokenizer, prose):
    """In any case of letters, anywhere in the continuation; the prompts reach the model in order, two at once."""
    asked = prompts("niah_3", 700, 5, tokenizer, 0, prose)
    said = [f" {p.answer.upper()}, I think" if i in (0, 3, 4) else p.answer[:-1] for i, p in enumerate(asked)]
    seen = []

    def generate(model, ids, count, end, vocabulary):
        assert (count, end, vocabulary) == (128, tokenizer.eos_id, tokenizer.vocab_size)
        seen.append(len(ids))
        return [tokenizer.encode(said[[p.ids for p in asked].index(one)]) for one in ids]

    monkeypatch.setattr(niah, "generate", generate)
    assert niah.score(None, tokenizer, asked, 2) == 3 / 5 and seen == [2, 2, 1]
