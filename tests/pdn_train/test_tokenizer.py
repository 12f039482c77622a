"""Tokenizer: facts of the model file, round trips, refusals. Judges: the text itself, hashlib, sentencepiece's own default model."""

import hashlib
import io

import pytest
import sentencepiece

from pdn_train.tokenizer import PROBE, Tokenizer, TokenizerError


def _train(texts: list[str], **settings) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="bpe", vocab_size=400, minloglevel=2, **settings
    )
    return model.getvalue()


def test_facts_of_the_file(tiny_tokenizer):
    tokenizer = Tokenizer.load(tiny_tokenizer)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (512, 1, 2)
    assert tokenizer.sha256 == hashlib.sha256(tiny_tokenizer.read_bytes()).hexdigest()


@pytest.mark.parametrize("text", ["def f(x):\n\treturn  x\n\nﬁsh ½ é", PROBE, " a  b ", "\n\n\t", "\x00", "漢字🙂", "a\r\nb", "</s><s>"])
def test_every_text_comes_back_and_nothing_is_added(tiny_tokenizer, text):
    tokenizer = Tokenizer.load(tiny_tokenizer)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, tokenizer.bos_id, tokenizer.eos_id} & set(ids)


def test_lossless_check_refuses_the_default_normaliser(documents, tmp_path):
    path = tmp_path / "default.model"
    path.write_bytes(_train(documents, byte_fallback=True))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.decode(tokenizer.encode("def f(x):\n\treturn  x\n\nﬁsh ½ é")) == "def f(x): return x fish 1⁄2 é"
    with pytest.raises(TokenizerError, match="default.model rewrites text.*comes back as"):
        tokenizer.check_lossless()


def test_lossless_check_accepts_a_lossless_model(tiny_tokenizer):
    Tokenizer.load(tiny_tokenizer).check_lossless()


def test_a_model_without_an_end_id_is_refused(documents, tmp_path):
    path = tmp_path / "endless.model"
    path.write_bytes(_train(documents, eos_id=-1))
    with pytest.raises(TokenizerError, match="endless.model has no end id"):
        Tokenizer.load(path)


def test_missing_and_foreign_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match="gone.model: No such file"):
        Tokenizer.load(tmp_path / "gone.model")
    (tmp_path / "notes.txt").write_text("not a model")
    with pytest.raises(TokenizerError, match="notes.txt is not a sentencepiece model"):
        Tokenizer.load(tmp_path / "notes.txt")


@pytest.mark.parametrize("token", [-1, 512])
def test_ids_outside_the_vocabulary_are_named(tiny_tokenizer, token):
    with pytest.raises(TokenizerError, match=f"token id {token} is outside the 512 pieces"):
        Tokenizer.load(tiny_tokenizer).decode([5, token])
