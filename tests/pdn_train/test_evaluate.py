"""The mean is over targets, whatever the batches; the command reads what the run says and refuses what cannot be evaluated."""

import json
import math
import os
import re
import subprocess
import sys
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import pdn_train
from pdn_train import evaluate, export, mqar, niah, telling
from pdn_train.config import ConfigError, EvalConfig, build
from pdn_train.data import Batch
from pdn_train.shards import Shards
from pdn_train.tasks import TASKS, Options, evaluate_loss


class Fixed(nn.Module):
    """A model whose loss at each target is the input id there."""

    def forward(self, input_ids, labels=None, cu_seqlens=None, relay=None):
        return (input_ids * (labels != -100)).sum().float()


def batch(ids: list[int], valid: int) -> Batch:
    """One row with `valid` targets, the rest masked."""
    labels = torch.full((1, len(ids)), -100)
    labels[0, :valid] = 0
    return Batch(torch.tensor([ids]), labels, None, valid)


def test_every_target_weighs_the_same():
    """2 targets at loss 1 and 14 at loss 3 give 44 / 16 = 2.75; the mean of means would be 2. No targets add nothing."""
    batches = [batch([1] * 16, 2), batch([3] * 16, 14), batch([9] * 16, 0)]
    assert evaluate_loss(Fixed(), batches, "cpu") == (44.0, 16)
    assert evaluate_loss(Fixed(), [], "cpu") == (0.0, 0)


def test_the_sum_is_kept_in_fp64():
    assert evaluate_loss(Fixed(), [batch([2**24], 1), *[batch([1], 1)] * 3], "cpu") == (2**24 + 3, 4)


@pytest.fixture
def run(tmp_path, make_run, make_model, tiny_shards):
    """A run folder whose model fits the tiny shards and whose data.val_path is their val/."""
    model = make_model(vocab_size=512)
    data = {"val_path": str(tiny_shards / "val"), "seq_len": 48}
    return make_run(tmp_path / "run", model, data, tiny_shards / "tokenizer.model"), model


def plain_loss(model, folder, samples: int, length: int) -> tuple[float, int]:
    """Nats per target over the first samples of a folder, one token stream at a time."""
    stream = torch.from_numpy(Shards.open(folder).read(0, samples * length + 1))
    rows = stream.unfold(0, length + 1, length)  # [samples, length + 1]
    with torch.no_grad():
        loss = F.cross_entropy(model(rows[:, :-1].contiguous()).double().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    return loss.item() / (samples * length), samples * length


def test_perplexity_of_a_run(run, tiny_shards, capsys):
    """Seven samples by threes: the last batch is smaller."""
    folder, model = run
    assert evaluate.main([str(folder), "--samples", "7", "--micro-batch", "3", "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((folder / "eval.json").read_text())
    loss, tokens = plain_loss(model, tiny_shards / "val", 7, 48)
    ppl = result["ppl"]
    assert abs(ppl["loss"] / loss - 1) < 1e-6 and (ppl["tokens"], ppl["samples"]) == (tokens, 7)
    assert ppl["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    totals = Shards.open(tiny_shards / "val").manifest.totals
    assert ppl["bits_per_byte"] == pytest.approx(loss / math.log(2) * totals.tokens / totals.bytes, rel=1e-6)
    assert ppl["data"] == str(tiny_shards / "val") and result["precision"] == "fp32"


def test_an_export_gives_the_runs_result(run, tiny_shards, tmp_path, capsys):
    export.export(run[0], tmp_path / "out")
    common = ["--data", str(tiny_shards / "val"), "--device", "cpu"]
    assert evaluate.main([str(run[0]), *common]) == 0
    assert evaluate.main([str(tmp_path / "out"), *common, "--output", str(tmp_path / "mine.json")]) == 0
    first, second = json.loads((run[0] / "eval.json").read_text()), json.loads((tmp_path / "mine.json").read_text())
    assert first["ppl"] == second["ppl"]
    assert first["ppl"]["samples"] == (Shards.open(tiny_shards / "val").tokens - 1) // 48


def test_documents_are_read_as_they_were_trained(tmp_path, make_run, make_model, make_shards):
    """With reset_at_documents the first token of each document is no target, and what came before does not matter."""
    model = make_model(vocab_size=100)
    shards = make_shards(tmp_path / "data", [[5, 6, 7], [8, 9, 10, 11]])  # 5 6 7 eos 8 9 10 11 eos
    runs = [make_run(tmp_path / name, model, {"seq_len": 8, "reset_at_documents": name == "reset"}) for name in ("reset", "through")]
    results = [evaluate.evaluate(run, ["ppl"], Options(data=str(shards), micro_batch=1))["ppl"] for run in runs]
    assert [r["tokens"] for r in results] == [7, 8]
    with torch.no_grad():
        apart = [model(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])).item() for ids in ([5, 6, 7, 2], [8, 9, 10, 11, 2])]
    assert results[0]["loss"] * 7 == pytest.approx(sum(apart), rel=1e-6)
    assert results[1]["loss"] != results[0]["loss"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tasks", "ppl,glue"], "--tasks glue: there is no such task; there are ppl, mqar, niah"),
        (["--samples", "100000"], "--samples 100000: .* holds .* samples of 48 tokens"),
        (["--samples", "0"], "--samples 0"),
        (["--micro-batch", "0"], "--micro-batch 0 is below 1"),
        (["--data", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_refusals(run, capsys, arguments, message):
    assert evaluate.main([str(run[0]), "--device", "cpu", *arguments]) == 1
    said = capsys.readouterr()
    assert said.out == "" and pytest.raises(AssertionError, match=message).matches(AssertionError(said.err))
    assert not (run[0] / "eval.json").exists()


@pytest.mark.parametrize("task", ["commonsense", "recall", "harness"])
def test_a_task_that_needs_the_harness_is_named_as_it_was_given(run, monkeypatch, capsys, task):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "pdn_train.harness", raising=False)
    monkeypatch.delattr(pdn_train, "harness", raising=False)
    assert evaluate.main([str(run[0]), "--device", "cpu", "--tasks", task]) == 1
    assert f"error: --tasks {task} needs lm-evaluation-harness" in capsys.readouterr().err


def test_the_file_has_the_result_though_nobody_reads_stdout(run, monkeypatch):
    def unread(*_, **options):
        if "file" not in options:
            raise BrokenPipeError

    monkeypatch.setattr(evaluate, "print", unread, raising=False)
    with pytest.raises(BrokenPipeError):
        evaluate.main([str(run[0]), "--samples", "2", "--device", "cpu"])
    assert json.loads((run[0] / "eval.json").read_text())["ppl"]["samples"] == 2


def test_event_files_that_cannot_be_written_are_an_error(run, capsys):
    (run[0] / "tb").touch()
    assert evaluate.main([str(run[0]), "--samples", "2", "--device", "cpu"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["ppl"]["samples"] == 2
    assert "error: the result is not in TensorBoard's files: " in said.err


def test_stdout_is_the_result_alone_and_needs_no_file(run, capsys, tmp_path):
    """A file that cannot be written costs the exit code, not the result."""
    arguments = [str(run[0]), "--samples", "2", "--device", "cpu", "--output", str(tmp_path / "nowhere" / "eval.json")]
    assert evaluate.main(arguments) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["ppl"]["samples"] == 2
    assert "error: the result is printed but not in" in said.err and "nowhere/eval.json: No such file or directory" in said.err


def test_stdout_is_json_in_a_fresh_process(run):
    """Whatever the libraries print while they are imported: DeepSpeed warns on stdout where it finds no GPU."""
    command = [sys.executable, "-m", "pdn_train.evaluate", str(run[0]), "--samples", "2", "--device", "cpu"]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout) == json.loads((run[0] / "eval.json").read_text())


def test_how_far_a_task_is_goes_to_stderr(run, monkeypatch, capsys):
    """Its size when it begins, then at most a line every ten seconds: batches of 3 at 4 s each are told after the 3rd and the 6th."""
    seconds = iter(range(0, 1000, 4))
    monkeypatch.setattr(telling.time, "monotonic", lambda: next(seconds))
    assert evaluate.main([str(run[0]), "--samples", "20", "--micro-batch", "3", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    told = [line.partition(" of 48 tokens")[0] for line in said.err.splitlines() if line.startswith("ppl")]
    assert told == ["ppl: 20 samples", "ppl: 9 of 20 samples after 12 s", "ppl: 18 of 20 samples after 24 s"]
    assert json.loads(said.out)["ppl"]["samples"] == 20


def test_each_task_tells_all_it_does(run, monkeypatch, capsys):
    monkeypatch.setattr(telling, "EVERY_SECONDS", 0.0)
    arguments = ["--tasks", "mqar,niah_1", "--pairs", "2", "--lengths", "480,490", "--samples", "2", "--micro-batch", "1"]
    assert evaluate.main([str(run[0]), "--device", "cpu", *arguments]) == 0
    told = [line.partition(" after")[0] for line in capsys.readouterr().err.splitlines() if line.startswith(("mqar", "niah"))]
    begun = ["mqar: 4 examples of 2 pairs in 480, 490 tokens", "mqar: 2 of 4 examples"]  # both at once
    assert told == [*begun, "niah: 4 prompts of niah_1 in 480, 490 tokens", *(f"niah: {n} of 4 prompts" for n in (1, 2, 3))]


# ---- recall ----


@torch.no_grad()
def recalled(model, pairs: int, length: int, seed: int, count: int) -> float:
    """The accuracy, one example and one question at a time."""
    right = []
    for number in range(count):
        inputs, labels = mqar.example(pairs, length, model.config.vocab_size, seed, "validation", number)
        logits = model(torch.from_numpy(inputs)[None])[0]
        right += [int(logits[t].argmax()) == labels[t] for t in range(length) if labels[t] != -100]
    return sum(right) / len(right)


def test_mqar_on_what_the_run_was_trained_on_and_on_other_lengths(tmp_path, make_run, make_model, capsys):
    model = make_model(vocab_size=16)
    folder = make_run(tmp_path / "run", model, {"path": None, "mqar_pairs": 2, "seq_len": 12, "seed": 5})
    assert evaluate.main([str(folder), "--tasks", "mqar", "--samples", "40", "--device", "cpu"]) == 0
    found = json.loads((folder / "eval.json").read_text())["mqar"]
    expected = recalled(model, 2, 12, 5, 40)
    assert 0 < expected < 1 and found == {"pairs": 2, "samples": 40, "accuracy": expected, "lengths": {"12": expected}}
    assert evaluate.main([str(folder), "--tasks", "mqar", "--samples", "9", "--pairs", "3", "--lengths", "16,20", "--device", "cpu"]) == 0
    found = json.loads((folder / "eval.json").read_text())["mqar"]
    assert found["lengths"] == {"16": recalled(model, 3, 16, 5, 9), "20": recalled(model, 3, 20, 5, 9)}
    capsys.readouterr()
    assert evaluate.main([str(folder), "--tasks", "mqar", "--lengths", "6", "--device", "cpu"]) == 1
    assert "2 pairs need an even length of at least 8 tokens, not 6: set --lengths so, or lower --pairs to 1" in capsys.readouterr().err


@pytest.mark.parametrize("lengths, pairs", [("256,512", 64), ("256,96", 24), ("", 12)])
def test_mqar_on_a_model_of_language_has_64_pairs_or_what_fits(run, capsys, lengths, pairs):
    arguments = ["--tasks", "mqar", "--lengths", lengths, "--samples", "1", "--device", "cpu"]
    assert evaluate.main([str(run[0]), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["mqar"]["pairs"] == pairs


def test_mqar_on_a_small_vocabulary_has_the_pairs_that_it_has_keys_for(tmp_path, make_run, make_model):
    folder = make_run(tmp_path / "run", make_model(vocab_size=16), {"seq_len": 64})
    assert evaluate.evaluate(folder, ["mqar"], Options(samples=1))["mqar"]["pairs"] == 7


@pytest.mark.parametrize("format", ["safetensors", "fla"])
def test_an_export_is_evaluated_on_what_its_run_was_where_that_is(run, tmp_path, tiny_shards, make_run, capsys, format):
    export.export(run[0], tmp_path / "out", format=format)
    assert evaluate.main([str(tmp_path / "out"), "--samples", "2", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["ppl"]["data"] == str(tiny_shards / "val")
    gone = make_run(tmp_path / "other", run[1], {"val_path": "gone/val"}, tiny_shards / "tokenizer.model")
    export.export(gone, tmp_path / "moved", format=format)
    for place in (gone, tmp_path / "moved"):
        assert evaluate.main([str(place), "--device", "cpu"]) == 1
        assert "has data.val_path=gone/val, which is not a folder here; name one of shards with --data" in capsys.readouterr().err
    assert evaluate.main([str(tmp_path / "moved"), "--samples", "2", "--device", "cpu", "--data", str(tiny_shards / "val")]) == 0


def test_what_is_not_finite_is_null(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TASKS, "ppl", lambda subject, options: {"loss": 800.0, "perplexity": math.inf})
    assert evaluate.main([str(run[0]), "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["ppl"] == {"loss": 800.0, "perplexity": None}


@pytest.mark.parametrize(
    "lengths, message",
    [
        ("256", r"error: niah_1 needs a length of at least \d+ tokens, 128 of them for the answer, not 256: set --lengths so"),
        ("480,256", r"not 256: set --lengths so"),
        ("255", r"error: 63 pairs need an even length of at least 252 tokens, not 255: set --lengths so"),
    ],
)
def test_lengths_are_refused_before_any_task_runs(run, monkeypatch, capsys, lengths, message):
    for task in ("ppl", "mqar", "niah_1"):
        monkeypatch.setitem(TASKS, task, lambda subject, options: pytest.fail("a task ran"))
    arguments = ["--tasks", "ppl,mqar,niah_1", "--samples", "3", "--device", "cpu", "--lengths", lengths]
    assert evaluate.main([str(run[0]), *arguments]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_needles_at_every_length_and_into_tensorboard(run, monkeypatch, capsys):
    """The prompts' answers are told for two of the variants; the numbers stand under the checkpoint's step, in a run of their own."""
    folder, _ = run
    told: dict[tuple, str] = {}

    def prompts(variant, length, count, tokenizer, seed, prose):
        assert len(prose) > 1000
        made = niah.Prompt([length, len(told)], f"{variant} {length}")
        told[tuple(made.ids)] = made.answer if variant != "niah_3" else "?"
        return [made] * count

    monkeypatch.setattr(niah, "prompts", prompts)
    monkeypatch.setattr(
        niah, "score", lambda model, tokenizer, asked, at_once, done: sum(told[tuple(p.ids)] == p.answer for p in asked) / len(asked)
    )
    assert evaluate.main([str(folder), "--tasks", "niah", "--lengths", "512,1024", "--samples", "2", "--device", "cpu"]) == 0
    found = json.loads((folder / "eval.json").read_text())["niah"]
    assert found["niah_1"] == found["niah_2"] == {"512": 1.0, "1024": 1.0} and found["niah_3"] == {"512": 0.0, "1024": 0.0}
    assert found["accuracy"] == pytest.approx(2 / 3) and len(told) == 6
    events = EventAccumulator(str(folder / "tb" / "evaluation")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("evaluation/niah/niah_2/1024")] == [(5, 1.0)]
    assert list((folder / "tb").iterdir()) == [folder / "tb" / "evaluation"]


def test_needles_are_looked_for_in_the_text_of_the_shards(run, tmp_path, capsys):
    """For real: the model says nothing that holds a UUID. Prose can come from a file too."""
    (tmp_path / "prose.txt").write_text("It was so. It is good. " * 30)
    for more in ([], ["--prose", str(tmp_path / "prose.txt")]):
        assert evaluate.main([str(run[0]), "--tasks", "niah_3", "--lengths", "480", "--samples", "1", "--device", "cpu", *more]) == 0
        assert json.loads(capsys.readouterr().out)["niah_3"] == {"samples": 1, "accuracy": 0.0, "niah_3": {"480": 0.0}}
    (tmp_path / "empty.txt").write_text(" \n")
    for name in ("none", "empty.txt"):
        assert evaluate.main([str(run[0]), "--tasks", "niah_3", "--device", "cpu", "--prose", str(tmp_path / name)]) == 1
        assert f"--prose {tmp_path / name}" in capsys.readouterr().err


def test_the_configuration_knows_the_tasks_that_can_run_while_training():
    names = get_args(get_args(EvalConfig.model_fields["tasks"].annotation)[0])
    assert set(names) == {name for name in TASKS if name.startswith(("mqar", "niah"))}
    with pytest.raises(ConfigError, match="eval.tasks=.* run at validations: set eval.every"):
        build({"run_dir": "r", "data": {"path": "d"}, "eval": {"tasks": ["niah"]}}, "x")
    with pytest.raises(ConfigError, match="eval.tasks with mqar needs data.mqar_pairs"):
        build({"run_dir": "r", "data": {"path": "d", "val_path": "v"}, "eval": {"tasks": ["mqar"], "every": 5}}, "x")
    with pytest.raises(ConfigError, match="data.mqar_pairs=2 trains without one"):
        build({"run_dir": "r", "data": {"mqar_pairs": 2}, "eval": {"tasks": ["niah_2"], "every": 5}}, "x")
    with pytest.raises(ConfigError, match="parallel.zero=3 cannot; use parallel.zero=2"):
        data = {"path": "d", "val_path": "v"}
        build({"run_dir": "r", "data": data, "eval": {"tasks": ["niah_1"], "every": 5}, "parallel": {"zero": 3}}, "x")


# ---- refusals ----


@pytest.mark.parametrize("key", ["seq_len", "reset_at_documents"])
def test_an_export_that_does_not_say_how_it_was_trained_is_refused(run, tmp_path, tiny_shards, capsys, key):
    export.export(run[0], tmp_path / "out")
    file = tmp_path / "out" / "config.yaml"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if key not in line))
    assert evaluate.main([str(tmp_path / "out"), "--data", str(tiny_shards / "val"), "--device", "cpu"]) == 1
    assert f"out has no data.{key}, as the model was trained; add it to its config.yaml" in capsys.readouterr().err


def test_no_data_and_another_tokenizer_are_refused(tmp_path, make_run, make_model, make_shards, tiny_shards, capsys):
    plain = make_run(tmp_path / "plain", make_model(vocab_size=512), {}, tiny_shards / "tokenizer.model")
    assert evaluate.main([str(plain), "--device", "cpu"]) == 1
    assert "has no data.val_path; name a folder of shards with --data" in capsys.readouterr().err
    other = make_shards(tmp_path / "other", [[5, 6, 7] * 30], sha256="ab")
    assert evaluate.main([str(plain), "--device", "cpu", "--data", str(other)]) == 1
    assert "was made with another tokenizer (sha256 ab) than the model's" in capsys.readouterr().err


def test_another_kernel_gives_the_same_on_a_machine_without_a_gpu(run, tmp_path, make_run, make_model, tiny_shards):
    """A run made for Triton kernels is evaluated on the CPU by asking for the torch ones."""
    trained = make_run(tmp_path / "triton", make_model(vocab_size=512, kernel="triton"), {"seq_len": 48})
    options = Options(data=str(tiny_shards / "val"), samples=3, kernel="torch")
    assert evaluate.evaluate(trained, ["ppl"], options)["ppl"] == evaluate.evaluate(run[0], ["ppl"], options)["ppl"]
