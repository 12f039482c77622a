"""Generation against the full forward at every token; sampling against its probabilities; the command line."""

import os

import pytest
import torch

from pdn_train import generate as generation
from pdn_train.generate import GenerationError, generate, sample

PROMPTS = [[5, 9, 11, 40, 7], [3], [60, 61]]


@torch.no_grad()
def greedy(model, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens by running the whole text again for each."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("recurrence", ["pgdn", "pkda", "dn"])
def test_greedy_text_is_that_of_the_full_forward(make_model, recurrence):
    model = make_model(recurrence=recurrence, tie_embeddings=False)
    texts = generate(model, PROMPTS, 20)
    assert texts == [greedy(model, prompt, 20) for prompt in PROMPTS]
    assert generate(model, PROMPTS[1:2], 20) == texts[1:2]
    assert len(set(texts[0])) > 3  # a text of one token would show little


@pytest.mark.parametrize("recurrence", ["dn", "pdn", "gdn", "pgdn", "kda", "pkda"])
def test_a_prompt_read_by_chunks_leaves_what_token_by_token_leaves(make_model, recurrence):
    """Logits and everything remembered, in fp64; 70 tokens are more than a chunk, 1 and 3 fewer than the convolution reads."""
    model = make_model(recurrence=recurrence).double()
    prompts = [torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(length)) for length in (70, 1, 3)]
    starts = torch.tensor([0, 70, 71, 74])
    with torch.no_grad():
        logits, cache = model.prefill(torch.cat(prompts)[None], starts)
        for n, prompt in enumerate(prompts):
            expected, slow = model.prefill(prompt[None, :1], torch.tensor([0, 1]))
            for token in prompt[1:]:
                expected = model.step(token[None], slow)
            assert (logits[n] - expected[0]).abs().max() < 1e-12
            for fast, one in zip(cache.layers, slow.layers, strict=True):
                parts = zip((*fast.state, fast.history), (*one.state, one.history), strict=True)
                assert all((a[n] - b[0]).abs().max() < 1e-12 for a, b in parts if a is not None)


def test_texts_end_at_the_end_id(make_model):
    """Each sequence ends by itself and the others go on."""
    model = make_model()
    texts = generate(model, PROMPTS, 12, temperature=1.0)
    end = next(token for i, token in enumerate(texts[0]) if i > 1 and token not in texts[0][:i])
    expected = [text[: text.index(end)] if end in text else text for text in texts]
    assert 1 < len(expected[0]) < 12 and len({len(text) for text in expected}) > 1
    assert generate(model, PROMPTS, 12, temperature=1.0, end=end) == expected


def test_sampling_depends_on_the_seed_alone(make_model):
    model = make_model()
    texts = [generate(model, PROMPTS, 16, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def draw(logits: list[float], temperature: float, top_p: float, times: int = 20_000) -> torch.Tensor:
    """How often each id was drawn, as a share."""
    rows = torch.tensor([logits]).expand(times, -1)
    drawn = sample(rows, temperature, top_p, torch.Generator().manual_seed(0))
    return torch.bincount(drawn, minlength=len(logits)) / times


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist()
    for temperature in (1.0, 0.5):
        expected = torch.softmax(torch.tensor(logits) / temperature, 0)
        assert (draw(logits, temperature, 1.0) - expected).abs().max() < 0.015  # 4 standard deviations
    assert draw(logits, 0.0, 1.0).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("top_p, kept", [(0.3, [1]), (0.39, [1]), (0.41, [1, 3]), (0.71, [1, 2, 3]), (1e-9, [1])])
def test_top_p_keeps_the_fewest_that_reach_it(top_p, kept):
    shares = draw(torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist(), 1.0, top_p)
    assert shares.nonzero()[:, 0].tolist() == kept
    expected = torch.tensor([0.1, 0.4, 0.2, 0.3])[kept]
    assert (shares[kept] - expected / expected.sum()).abs().max() < 0.015


@pytest.mark.parametrize("temperature, top_p", [(1e-40, 1.0), (1e-320, 1.0), (1.0, 1e-300)])
def test_the_smallest_numbers_draw_the_likeliest(temperature, top_p):
    assert draw([0.1, 0.4, 0.2, 0.3], temperature, top_p, 4).tolist() == [0, 1, 0, 0]


def test_ids_beyond_the_tokenizer_are_never_drawn(make_model):
    model = make_model()
    assert max(max(text) for text in generate(model, PROMPTS, 30)) >= 20
    for temperature in (0.0, 2.0):
        assert max(max(text) for text in generate(model, PROMPTS, 30, temperature=temperature, vocabulary=20)) < 20


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompts": [[1], []]}, "a prompt is empty"),
        ({"prompts": []}, "a prompt is empty"),
        ({"prompts": [[64]]}, "token id 64 is outside the model's vocabulary of 64"),
        ({"max_tokens": 0}, "max_tokens=0 is below 1"),
        ({"temperature": -1.0}, "temperature=-1.0 is no finite number"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0.0 is outside \(0, 1\]"),
    ],
)
def test_refusals(make_model, changes, message):
    with pytest.raises(GenerationError, match=message):
        generate(make_model(), **({"prompts": PROMPTS, "max_tokens": 4} | changes))


def test_command_line(tmp_path, make_run, make_model, tiny_tokenizer, capsys):
    """A vocabulary of 600, the last ones the likeliest, over a tokenizer of 512 pieces; two prompts; the speed goes to stderr."""
    model = make_model(vocab_size=600, tie_embeddings=False)
    model.head.weight.data[512:] *= 100
    folder = make_run(tmp_path / "run", model, {}, tiny_tokenizer)
    arguments = [str(folder), "--prompt", "In the beginning", "--prompt", "And God said", "--max-tokens", "6", "--device", "cpu"]
    assert generation.main(arguments) == 0
    said = capsys.readouterr()
    assert said.out.startswith("In the beginning") and "\nAnd God said" in said.out
    assert said.err.startswith("2 prompts, ") and "; 10 tokens more in " in said.err and said.err.count("tokens/s") == 2
    assert generation.main([str(folder), "--prompt", "", "--device", "cpu"]) == 1
    assert "a prompt is empty" in capsys.readouterr().err
    assert generation.main([str(folder), "--prompt", os.fsdecode(b"caf\xe9"), "--device", "cpu"]) == 1
    assert "error: --prompt 'caf\\udce9' is not UTF-8" in capsys.readouterr().err
    assert generation.main([*arguments, "--seed", str(2**63)]) == 1
    assert f"--seed {2**63} does not fit" in capsys.readouterr().err
    (folder / "tokenizer.model").unlink()
    assert generation.main(arguments) == 1
    assert "has no tokenizer.model" in capsys.readouterr().err
