"""Text from a model: the prompts at once by chunks, then token by token from the recurrent state.

    python -m pdn_train.generate RUN_OR_EXPORT --prompt TEXT [--prompt TEXT ...] [--max-tokens N] [--temperature T] [--top-p P] [--seed N]

All prompts go on together; each ends at the end-of-document token or after N tokens. Temperature 0 takes the likeliest token, and the same
prompt then gives the same text whatever stands beside it; above 0 the seed decides. Texts go to stdout, the speed to stderr: the prompts'
tokens, read by chunks, and the generated ones, the former's first excepted, each by their own seconds.

Each token costs one pass over the weights and, per sequence, one over its states (heads x head_dim^2 x 4 bytes a layer), however long the
text has become; nothing else is kept of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from pdn_train.model import LanguageModel
from pdn_train.telling import counted, quietly
from pdn_train.weights import DTYPES, UNREADABLE, load_model


class GenerationError(ValueError):
    """Nothing can be generated; the message names the argument and the way out."""


def generate(
    model: LanguageModel,
    prompts: list[list[int]],  # token ids, at least one each
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    end: int | None = None,  # the id that ends a text; None: only max_tokens does
    vocabulary: int | None = None,  # ids at or above it are never drawn; None: the model's
) -> list[list[int]]:
    """The ids that follow each prompt, without the end id. Raises GenerationError for an argument that cannot be met."""
    return timed(model, prompts, max_tokens, temperature, top_p, seed, end, vocabulary)[0]


def timed(
    model: LanguageModel,
    prompts: list[list[int]],
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    end: int | None,
    vocabulary: int | None,
) -> tuple[list[list[int]], float, float]:
    """`generate`, with the seconds until every prompt had its first token, and those of all later tokens."""
    _check(model, prompts, max_tokens, temperature, top_p)
    texts: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    started, read = time.perf_counter(), None
    for tokens in _tokens(model, prompts, temperature, top_p, seed, vocabulary):
        drawn = tokens.tolist()  # waits for the device
        read = read or time.perf_counter()
        running -= {n for n in running if drawn[n] == end}
        for n in running:
            texts[n].append(drawn[n])
        running -= {n for n in running if len(texts[n]) == max_tokens}
        if not running:
            break
    return texts, read - started, time.perf_counter() - read


@torch.no_grad()
def _tokens(
    model: LanguageModel, prompts: list[list[int]], temperature: float, top_p: float, seed: int, vocabulary: int | None
) -> Iterator[Tensor]:
    """The next token of every prompt [N], without end."""
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.tensor([[token for prompt in prompts for token in prompt]], device=device)  # [1, T]
    starts = torch.tensor([0, *(len(prompt) for prompt in prompts)]).cumsum(0)
    logits, cache = model.prefill(ids, starts)
    while True:
        tokens = sample(logits[:, :vocabulary], temperature, top_p, generator)
        yield tokens
        logits = model.step(tokens, cache)


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """One token a row of logits [N, vocab] -> [N]: the likeliest at temperature 0, else drawn from softmax(logits / temperature).

    top_p keeps the fewest likeliest tokens whose probabilities add up to at least top_p.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double()  # in fp32 a small temperature makes infinities of them
    below = (logits - logits.amax(-1, keepdim=True)) / temperature
    probabilities, ids = torch.softmax(below, -1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities  # of the likelier ones together
    kept = probabilities.masked_fill(before >= top_p, 0)
    return ids.gather(-1, torch.multinomial(kept, 1, generator=generator))[:, 0]


def _check(model: LanguageModel, prompts: list[list[int]], max_tokens: int, temperature: float, top_p: float) -> None:
    if not prompts or not all(prompts):
        raise GenerationError("a prompt is empty: the model goes on from at least one token")
    worst = max(token for prompt in prompts for token in prompt)
    if worst >= model.config.vocab_size:
        raise GenerationError(f"token id {worst} is outside the model's vocabulary of {model.config.vocab_size}: another tokenizer made it")
    if max_tokens < 1:
        raise GenerationError(f"max_tokens={max_tokens} is below 1")
    if not 0 <= temperature < float("inf"):
        raise GenerationError(f"temperature={temperature} is no finite number >= 0")
    if not 0 < top_p <= 1:
        raise GenerationError(f"top_p={top_p} is outside (0, 1]")


def _text(argument: str) -> str:
    try:
        argument.encode()
    except UnicodeEncodeError:  # bytes of the command line that Python has kept as half surrogates
        raise GenerationError(f"--prompt {argument!r} is not UTF-8") from None
    return argument


def run(a: argparse.Namespace) -> None:
    if not -(2**63) <= a.seed < 2**63:
        raise GenerationError(f"--seed {a.seed} does not fit 64 bits")
    model, tokenizer = load_model(a.model, a.device, DTYPES[a.precision], a.kernel)
    if tokenizer is None:
        raise GenerationError(f"{a.model} has no tokenizer.model: put the one its shards were made with there")
    prompts = [tokenizer.encode(_text(prompt)) for prompt in a.prompt]
    ends = (tokenizer.eos_id, tokenizer.vocab_size)
    texts, reading, writing = timed(model, prompts, a.max_tokens, a.temperature, a.top_p, a.seed, *ends)
    for prompt, text in zip(prompts, texts, strict=True):
        print(tokenizer.decode([*prompt, *text]))
    read, later = sum(map(len, prompts)), sum(max(0, len(text) - 1) for text in texts)
    print(
        f"{counted(len(prompts), 'prompt')}, {counted(read, 'token')} read in {reading:.2f} s: {read / reading:.1f} tokens/s; "
        f"{counted(later, 'token')} more in {writing:.2f} s: {later / max(writing, 1e-9):.1f} tokens/s",
        file=sys.stderr,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pdn_train.generate", description="Let a run, a checkpoint or an export go on from prompts.")
    parser.add_argument("model", metavar="RUN_OR_EXPORT")
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (the default): the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--kernel", choices=("torch", "triton"), help="what to run the recurrence on (default: the model's own)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    try:
        run(parser.parse_args(argv))
    except (GenerationError, *UNREADABLE) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
