"""lm-evaluation-harness on a model of this project: its tasks ask, this file answers (the extra `lm-eval`).

    loglikelihood            log p(continuation | context) and whether every token of it is the likeliest
    loglikelihood_rolling    log p of a whole text, from the end-of-document token on
    generate_until           greedy text up to the first of some strings

Contexts and continuations are encoded together and parted by where the context's own encoding ends, as that library does for models of
transformers. A context that is empty is the end-of-document token. Requests are sorted by length and run several at once, packed side by
side without padding. Nothing is cut: these models have no greatest length.

`COMMONSENSE` and `RECALL` of `pdn_train.tasks` are the paper's lists; their data come from that library's usual places, or from task files
of one's own (`--harness-path`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from torch import Tensor

from pdn_train.generate import generate
from pdn_train.model import LanguageModel
from pdn_train.telling import Tally, silent
from pdn_train.tokenizer import Tokenizer

GENERATED = 256  # tokens, where a task names no limit
LOGITS = 2**28  # at once: 1 GiB in fp32


class Answers(LM):
    """The three questions that lm-evaluation-harness asks, each as a list of its requests."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, at_once: int, tell: Callable[[str], object] = silent):
        super().__init__()
        self._model, self._tokenizer, self._at_once, self._tell = model, tokenizer, at_once, tell

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [self._pair(*request.args) for request in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        tally = Tally("harness", len(pairs), "continuation", "to score", self._tell)
        for numbers, logits in self._scored(pairs):
            for n, rows in zip(numbers, logits, strict=True):  # rows [continuation, vocab] fp32
                wanted = torch.tensor(pairs[n][1], device=rows.device)
                logs = torch.log_softmax(rows, -1).gather(-1, wanted[:, None])
                found[n] = (logs.sum().item(), bool((rows.argmax(-1) == wanted).all()))
            tally.add(len(numbers))
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        wholes = [Instance("loglikelihood", {}, ("", *request.args), 0) for request in requests]
        return [logs for logs, _ in self.loglikelihood(wholes)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = [self._context(request.args[0]) for request in requests]
        wanted = [request.args[1] for request in requests]
        limits = [settings.get("max_gen_toks", GENERATED) for settings in wanted]
        texts = [""] * len(requests)
        order = sorted(range(len(requests)), key=lambda n: (limits[n], len(prompts[n])))
        tally = Tally("harness", len(order), "text", "to generate", self._tell)
        for start in range(0, len(order), self._at_once):
            numbers = order[start : start + self._at_once]
            ends = {"end": self._tokenizer.eos_id, "vocabulary": self._tokenizer.vocab_size}
            made = generate(self._model, [prompts[n] for n in numbers], max(limits[n] for n in numbers), **ends)
            for n, ids in zip(numbers, made, strict=True):
                whole = self._tokenizer.decode(prompts[n] + ids[: limits[n]])
                texts[n] = _until(whole[len(self._tokenizer.decode(prompts[n])) :], wanted[n].get("until", []))
            tally.add(len(numbers))
        return texts

    def _context(self, text: str) -> list[int]:
        return self._tokenizer.encode(text) or [self._tokenizer.eos_id]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of context and continuation; spaces at the context's end belong to the continuation's first word."""
        blank = len(context) - len(context.rstrip())
        if blank:
            context, continuation = context[:-blank], context[-blank:] + continuation
        first = self._context(context)
        if not context:
            return first, self._tokenizer.encode(continuation)
        return first, self._tokenizer.encode(context + continuation)[len(first) :]

    @torch.no_grad()
    def _scored(self, pairs: list[tuple[list[int], list[int]]]) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Batches of (numbers of the requests, for each the fp32 logits that predict its continuation)."""
        order = sorted((n for n, pair in enumerate(pairs) if pair[1]), key=lambda n: -sum(map(len, pairs[n])))
        while order:
            longest = sum(map(len, pairs[order[0]]))
            count = max(1, min(self._at_once, LOGITS // (longest * self._model.config.vocab_size)))
            numbers, order = order[:count], order[count:]
            texts = [pairs[n][0] + pairs[n][1][:-1] for n in numbers]
            starts = torch.tensor([0, *map(len, texts)]).cumsum(0)
            ids = torch.tensor([[i for text in texts for i in text]], device=self._model.embedding.weight.device)
            logits = self._model(ids, cu_seqlens=starts)[0]
            stops = starts[1:].tolist()
            yield numbers, [logits[stop - len(pairs[n][1]) : stop].float() for n, stop in zip(numbers, stops, strict=True)]


def _until(text: str, stops: list[str] | str) -> str:
    """The text before the first of the strings that end it."""
    for stop in [stops] if isinstance(stops, str) else stops:
        if stop:
            text = text.split(stop)[0]
    return text


def run(
    model: LanguageModel,
    tokenizer: Tokenizer,
    tasks: tuple[str, ...],
    at_once: int,
    samples: int | None,
    path: str | None,
    tell: Callable[[str], object],
) -> dict:
    """{task: {metric: value}} of the named tasks; `samples` of each at most; path: a folder with more task files."""
    manager = TaskManager(include_path=path)
    found = simple_evaluate(
        Answers(model, tokenizer, at_once, tell), tasks=list(tasks), limit=samples, task_manager=manager, bootstrap_iters=0
    )
    return {
        task: {name.removesuffix(",none"): value for name, value in result.items() if isinstance(value, (int, float))}
        for task, result in found["results"].items()
    }
