"""lm-evaluation-harness on a tiny model, with tasks made from local files; judged by the model's own forward, one request at a time.

Needs the extra lm-eval: `pip install -e '.[lm-eval]'`.
"""

import json

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402

from pdn_train import evaluate  # noqa: E402
from pdn_train.generate import generate  # noqa: E402
from pdn_train.harness import Answers  # noqa: E402
from pdn_train.tokenizer import Tokenizer  # noqa: E402


@pytest.fixture
def subject(make_model, tiny_tokenizer):
    return make_model(vocab_size=512), Tokenizer.load(tiny_tokenizer)


def asked(*arguments) -> list[Instance]:
    return [Instance("loglikelihood", {}, a, i) for i, a in enumerate(arguments)]


@torch.no_grad()
def plain(model, before: list[int], after: list[int]) -> tuple[float, bool]:
    """log p of the ids `after`, one at a time, each by a forward over all that stands before it."""
    total, likeliest = 0.0, True
    for n, token in enumerate(after):
        logs = torch.log_softmax(model(torch.tensor([before + after[:n]]))[0, -1].double(), -1)
        total, likeliest = total + logs[token].item(), likeliest and int(logs.argmax()) == token
    return total, likeliest


def test_likelihoods_are_those_of_the_plain_forward(subject):
    """Of several lengths at once, an empty context among them; a space at the context's end belongs to the continuation."""
    model, tokenizer = subject
    requests = [("In the beginning ", "God created"), ("", " the earth"), ("And God said, Let there be", " light"), ("And", " it was so")]
    found = Answers(model, tokenizer, 3).loglikelihood(asked(*requests))
    pairs = [("In the beginning", " God created"), ("", " the earth"), requests[2], requests[3]]
    for (logs, likeliest), (before, after) in zip(found, pairs, strict=True):
        whole, first = tokenizer.encode(before + after), tokenizer.encode(before)
        assert whole[: len(first)] == first
        expected = plain(model, first or [tokenizer.eos_id], whole[len(first) :])
        assert logs == pytest.approx(expected[0], abs=1e-4) and likeliest == expected[1]


def test_a_likeliest_continuation_is_known(subject):
    model, tokenizer = subject
    model.head.weight.data[tokenizer.encode(" light")] *= 50
    made = model(torch.tensor([tokenizer.encode("Let there be")]))[0, -1].argmax()
    text = tokenizer.decode(tokenizer.encode("Let there be") + [int(made)])[len("Let there be") :]
    assert Answers(model, tokenizer, 2).loglikelihood(asked(("Let there be", text)))[0][1] == (
        tokenizer.encode("Let there be" + text)[-1] == int(made)
    )


def test_a_whole_text_starts_at_the_end_of_a_document(subject):
    model, tokenizer = subject
    found = Answers(model, tokenizer, 2).loglikelihood_rolling(asked(("And it was so.",), ("Amen",)))
    for logs, text in zip(found, ("And it was so.", "Amen"), strict=True):
        assert logs == pytest.approx(plain(model, [tokenizer.eos_id], tokenizer.encode(text))[0], abs=1e-4)


def test_texts_end_where_they_are_told(subject):
    model, tokenizer = subject
    [whole] = Answers(model, tokenizer, 2).generate_until(asked(("And God said", {"until": [], "max_gen_toks": 12})))
    stop = whole[2]
    several = asked(("And God said", {"until": [stop], "max_gen_toks": 12}), ("And", {"max_gen_toks": 3}))
    cut, short = Answers(model, tokenizer, 2).generate_until(several)
    ids = generate(model, [tokenizer.encode("And")], 3, end=tokenizer.eos_id)[0]
    assert cut == whole.split(stop)[0] and "And" + short == tokenizer.decode(tokenizer.encode("And") + ids)


def test_tasks_of_local_files_run_from_the_command_line(tmp_path, make_run, make_model, tiny_tokenizer, capsys):
    """A multiple choice and a perplexity; the accuracy is that of the likelihoods computed plainly."""
    model, tokenizer = make_model(vocab_size=512), Tokenizer.load(tiny_tokenizer)
    folder = make_run(tmp_path / "run", model, {}, tiny_tokenizer)
    documents = [
        {"question": "In the beginning God created the", "choices": ["heaven", "ark", "flood"], "answer": 0},
        {"question": "And God said, Let there be", "choices": ["darkness", "light"], "answer": 1},
        {"question": "And the evening and the morning were the first", "choices": ["man", "day", "tree"], "answer": 1},
    ]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "choice.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "And it was so."}) + "\n")
    common = "dataset_path: json\ntest_split: test\ndataset_kwargs: {data_files: {test: %s}}\n"
    (tmp_path / "tasks" / "choice.yaml").write_text(
        "task: local_choice\noutput_type: multiple_choice\ndoc_to_text: question\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        + common % (tmp_path / "choice.jsonl")
        + "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    (tmp_path / "tasks" / "text.yaml").write_text(
        'task: local_text\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: text\n'
        + common % (tmp_path / "text.jsonl")
        + "metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]\n"
    )
    arguments = ["--tasks", "harness", "--harness-tasks", "local_choice,local_text", "--harness-path", str(tmp_path / "tasks")]
    assert evaluate.main([str(folder), "--device", "cpu", *arguments]) == 0
    result = json.loads((folder / "eval.json").read_text())["harness"]

    def best(d: dict) -> int:
        before = tokenizer.encode(d["question"])
        after = [tokenizer.encode(f"{d['question']} {choice}")[len(before) :] for choice in d["choices"]]
        logs = [plain(model, before, ids)[0] for ids in after]
        return logs.index(max(logs))

    assert result["local_choice"]["acc"] == pytest.approx(sum(best(d) == d["answer"] for d in documents) / 3)
    logs = plain(model, [tokenizer.eos_id], tokenizer.encode("And it was so."))[0]
    assert result["local_text"]["byte_perplexity"] == pytest.approx(torch.tensor(-logs / 14).exp().item(), rel=1e-4)
