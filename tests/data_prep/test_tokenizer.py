"""Training a tokenizer. Judges: the text that comes back, the bytes of a second training, the documents given."""

import json

import pytest

from data_prep import tokenizer as training
from data_prep.inputs import find_inputs
from pdn_train.tokenizer import Tokenizer


def test_the_same_text_in_other_files_gives_the_same_model(documents, tiny_tokenizer, tmp_path):
    for n, start in enumerate((2, 0, 1)):
        (tmp_path / f"{n}.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in documents[start::3]))
    arguments = ["--vocab-size", "512", "--text-field", "body", "--output", str(tmp_path / "new" / "t.model")]
    assert training.main([str(tmp_path), *arguments]) == 0
    assert (tmp_path / "new" / "t.model").read_bytes() == tiny_tokenizer.read_bytes()


def test_the_corpus_comes_back_and_is_compressed(documents, tiny_tokenizer):
    tokenizer = Tokenizer.load(tiny_tokenizer)
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in documents)
    tokens, size = sum(len(tokenizer.encode(text)) for text in documents), sum(len(text.encode()) for text in documents)
    assert tokens / size < 0.5


def test_line_breaks_tabs_and_runs_of_spaces_get_pieces_where_they_are_common(tmp_path):
    (tmp_path / "code.txt").write_text("".join(f"def f{n}(x):\n\tif x:\n        return {n}\n\n" for n in range(300)))
    assert training.main([str(tmp_path / "code.txt"), "--vocab-size", "310", "--output", str(tmp_path / "t.model")]) == 0
    tokenizer = Tokenizer.load(tmp_path / "t.model")
    assert len(tokenizer.encode("\t")) == 1 and len(tokenizer.encode("\n")) == 1 and len(tokenizer.encode("        ")) == 1


def test_the_sample_is_bounded_and_drawn_from_all_inputs(documents, tmp_path):
    for n in range(2):
        (tmp_path / f"{n}.jsonl").write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for text in documents))
    inputs = find_inputs([str(tmp_path)], "text")
    texts = training.sample(inputs, "text", 40_000)
    assert 38_000 < sum(len(text.encode()) for text in texts) <= 40_000
    assert 0.3 < sum(text.startswith("0") for text in texts) / len(texts) < 0.7
    assert texts == training.sample(inputs[::-1], "text", 40_000)
    assert sorted(training.sample(inputs, "text", 10**9)) == sorted(f"{n} {text}" for n in range(2) for text in documents)


@pytest.mark.parametrize(
    "output, reason", [("", "it is a folder"), ("a.txt/t.model", "File exists"), ("a.txt/b/t.model", "Not a directory")]
)
def test_an_output_that_cannot_be_written_is_named_before_the_training(output, reason, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("text " * 100)
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("trained"))
    assert training.main([str(tmp_path / "a.txt"), "--vocab-size", "300", "--output", str(tmp_path / output)]) == 1
    error = capsys.readouterr().err
    assert f"error: cannot write {tmp_path / output}: " in error and reason in error and "name another file with --output" in error


def test_a_text_without_spaces_makes_a_tokenizer_that_has_them(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "前置条件的增量网络"}\n' * 20)
    assert training.main([str(tmp_path / "a.jsonl"), "--vocab-size", "275", "--output", str(tmp_path / "t.model")]) == 0
    tokenizer = training.Tokenizer.load(tmp_path / "t.model")
    assert tokenizer.decode(tokenizer.encode("a  b 网络")) == "a  b 网络"


@pytest.mark.parametrize("option", [["--vocab-size", "0"], ["--vocab-size", str(2**31)], ["--vocab-size", "300", "--sample-bytes", "0"]])
def test_sizes_out_of_range_are_named(option, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text " * 100)
    assert training.main([str(tmp_path / "a.txt"), "--output", str(tmp_path / "t.model"), *option]) == 2
    assert f"error: {option[-2]} {option[-1]} is out of range" in capsys.readouterr().err


def test_faults_are_errors_with_a_way_out(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("only a little text")
    for size, fault in (("100", "Vocabulary size is smaller"), ("30000", "Vocabulary size too high")):  # than the 256 bytes; for the text
        assert training.main([str(tmp_path / "a.txt"), "--vocab-size", size, "--output", str(tmp_path / "t.model")]) == 1
        err = capsys.readouterr().err
        assert f"error: cannot train {size} pieces on this text: {fault}" in err and "choose another --vocab-size" in err
    assert training.main([str(tmp_path / "gone.txt"), "--vocab-size", "300", "--output", str(tmp_path / "t.model")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'gone.txt'} does not exist: name a file that ends in .jsonl, ")
    (tmp_path / "b.jsonl").write_text("broken\n")
    assert training.main([str(tmp_path / "b.jsonl"), "--vocab-size", "300", "--output", str(tmp_path / "t.model")]) == 1
    assert "left out 1 bad record;" in (err := capsys.readouterr().err) and "hold no text" in err
    assert not (tmp_path / "t.model").exists()
