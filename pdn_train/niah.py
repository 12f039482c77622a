"""A needle in a haystack: RULER's single-needle tasks S-NIAH-1, -2 and -3 (arXiv:2404.06654), seeded, at any length.

A prompt is instructions, a long text with one sentence in it that gives a key a value, and a question for that value; the model goes on
greedily for 128 tokens and is right where they hold the value. Of each length, as much text as fits beside the rest and those 128 tokens:

    niah_1    the text is five short sentences over and over; the value is a number of seven digits
    niah_2    real prose; a number
    niah_3    real prose; a UUID

Sentences, templates, places of the needle (anywhere in niah_1, one of 40 equal depths in the others) and the score are RULER's. What
differs, since nothing is downloaded: the prose is the text one gives (RULER: Paul Graham's essays), cut into sentences by a regular
expression, and a key is two words of the lists below (RULER: a package's). Scores compare between models on the same text, not with
published ones.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdn_train.generate import generate
from pdn_train.model import LanguageModel
from pdn_train.telling import silent
from pdn_train.tokenizer import Tokenizer

ANSWER_TOKENS = 128
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(100 * i / 39) for i in range(40)]  # per cent of the sentences
INSTRUCTION = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} afterwards.\n"
    "{context}\nWhat is the special magic {kind} for {key} mentioned in the provided text?"
    " The special magic {kind} for {key} mentioned in the provided text is"
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
KINDS = {"niah_1": "number", "niah_2": "number", "niah_3": "uuid"}
FIRST = (
    "able ample blunt brave brief broad calm cheap civil clean clear cold cool cruel curly daily damp dark deep dense dry dull eager "
    "early empty equal exact faint fair false fast fierce final firm flat fond fresh full gentle glad grand grave green happy harsh "
    "heavy hollow honest huge humble idle keen kind large late lazy light lively local lonely long loud loyal mild modest narrow neat "
    "noble noisy odd old open outer pale plain polite proud quick quiet rapid rare ripe rough round royal sharp short silent simple"
)
SECOND = (
    "acorn anchor apple arrow autumn axle badge banner barn basin basket beacon bell bench berry blanket bottle branch bridge brook "
    "bucket button cabin candle canyon carpet castle cedar chapel cherry cliff clock cloud coast copper corner cottage cradle crown "
    "desert dragon drum eagle engine falcon feather fence ferry field flame forest fountain garden gate glacier glove hammer harbor "
    "harvest hedge island jacket kettle ladder lagoon lantern ledge lemon letter linen magnet maple marble meadow mirror mountain "
    "needle oasis orchard otter oven paddle palace parcel pearl pebble pillow planet plough pocket prairie quarry river saddle"
)


class NiahError(ValueError):
    """No such prompt can be made; the message names the length and the way out."""


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    answer: str


@dataclass(frozen=True)
class _Drawn:
    """What a prompt asks for and where it hides it; a function of seed, variant, length and number."""

    variant: str
    kind: str
    key: str
    value: str
    place: float

    def ids(self, amount: int, prose: str, tokenizer: Tokenizer) -> list[int]:
        """The prompt around so much text: lines of niah_1, words of the others."""
        needle = NEEDLE.format(kind=self.kind, key=self.key, value=self.value)
        context = _repeated(amount, self.place, needle) if self.variant == "niah_1" else _prose(prose, amount, self.place, needle)
        return tokenizer.encode(INSTRUCTION.format(kind=self.kind, key=self.key, context=context))


def prompts(variant: str, length: int, count: int, tokenizer: Tokenizer, seed: int, prose: str) -> list[Prompt]:
    """`count` prompts of at most `length` - 128 tokens each, a function of the arguments alone. Raises NiahError as `check` does."""
    made, units, limit = [], None, length - ANSWER_TOKENS
    for drawn in _draw(variant, length, count, seed):
        if len(drawn.ids(1, prose, tokenizer)) > limit:
            check(variant, length, count, tokenizer, seed, prose)
        units = _most(lambda amount, drawn=drawn: drawn.ids(amount, prose, tokenizer), limit) if units is None else units
        amount, whole = units, drawn.ids(units, prose, tokenizer)
        while len(whole) > limit:  # another key or value may take a token more
            amount -= 1
            whole = drawn.ids(amount, prose, tokenizer)
        made.append(Prompt(whole, drawn.value))
    return made


def check(variant: str, length: int, count: int, tokenizer: Tokenizer, seed: int, prose: str) -> None:
    """Raise NiahError, with the smallest length that fits, where one of the prompts has no room for any text."""

    def needed(length: int) -> int:
        """By the keys and values that are drawn for a length."""
        return ANSWER_TOKENS + max(len(drawn.ids(1, prose, tokenizer)) for drawn in _draw(variant, length, count, seed))

    if needed(length) > length:
        fits = needed(length)
        while needed(fits) > fits:
            fits += 1
        raise NiahError(
            f"{variant} needs a length of at least {fits} tokens, {ANSWER_TOKENS} of them for the answer, not {length}: set --lengths so "
            "(while training: data.seq_len)"
        )


def _draw(variant: str, length: int, count: int, seed: int) -> Iterator[_Drawn]:
    for number in range(count):
        draw = random.Random(f"{seed} {variant} {length} {number}")
        kind, key = KINDS[variant], f"{draw.choice(FIRST.split())}-{draw.choice(SECOND.split())}"
        value = str(draw.randint(10**6, 10**7 - 1)) if kind == "number" else str(uuid.UUID(int=draw.getrandbits(128), version=4))
        yield _Drawn(variant, kind, key, value, draw.random())


def _most(ids: Callable[[int], list[int]], limit: int) -> int:
    """The largest amount of text whose prompt has at most `limit` tokens; 1 fits."""
    low, high = 1, 2
    while len(ids(high)) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(ids(middle)) <= limit else (low, middle)
    return low


def _repeated(amount: int, place: float, needle: str) -> str:
    lines = [NOISE] * amount
    lines.insert(int(place * amount), needle)
    return "\n".join(lines)


def _prose(prose: str, amount: int, place: float, needle: str) -> str:
    """The first `amount` words, over and over where there are fewer, and the needle between two of their sentences."""
    words = prose.split()
    words = (words * (-(-amount // len(words))))[:amount]
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(words))
    sentences.insert(int(len(sentences) * DEPTHS[int(place * len(DEPTHS))] / 100), needle)
    return " ".join(sentences)


def score(model: LanguageModel, tokenizer: Tokenizer, asked: list[Prompt], at_once: int, done: Callable[[int], object] = silent) -> float:
    """The share of prompts whose continuation holds the answer, in any case of letters. done: takes how many more are."""
    right = 0
    for start in range(0, len(asked), at_once):
        batch = asked[start : start + at_once]
        texts = generate(model, [p.ids for p in batch], ANSWER_TOKENS, end=tokenizer.eos_id, vocabulary=tokenizer.vocab_size)
        right += sum(p.answer.lower() in tokenizer.decode(text).lower() for p, text in zip(batch, texts, strict=True))
        done(len(batch))
    return right / len(asked)
