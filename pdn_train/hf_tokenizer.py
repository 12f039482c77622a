"""A sentencepiece BPE model as the two JSON files that transformers' AutoTokenizer loads, giving the same ids for the same text.

    tokenizer.json          vocabulary, merges, byte fallback, the treatment of spaces
    tokenizer_config.json   which ids begin and end a document; neither is added to a text, and a text that spells one is plain text

Sentencepiece joins, again and again, the neighbours whose joined piece has the best score. The `tokenizers` library joins the pair that
stands first in a list of merges. The list that makes them equal holds, for every piece, every cut of it into two pieces, in the order of
the pieces' scores. Other kinds of model (unigram, or with a normaliser that rewrites text) are refused: sentencepiece itself reads those.
"""

from __future__ import annotations

import json

from sentencepiece import sentencepiece_model_pb2

from pdn_train.tokenizer import Tokenizer, TokenizerError

SPACE = "\u2581"  # sentencepiece's spelling of the space
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
BPE = 2  # model_type


def to_json(tokenizer: Tokenizer) -> dict[str, str]:
    """File name -> contents. Raises TokenizerError for a model that these files cannot express."""
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(tokenizer.file.read_bytes())
    _check(tokenizer, model)
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, piece.piece) for i, piece in enumerate(model.pieces) if piece.type in (UNKNOWN, CONTROL)],
        "normalizer": _normalizer(model),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _decoder(model),
        "model": {
            "type": "BPE",
            "unk_token": model.pieces[model.trainer_spec.unk_id].piece,
            "fuse_unk": True,
            "byte_fallback": any(piece.type == BYTE for piece in model.pieces),
            "vocab": {piece.piece: i for i, piece in enumerate(model.pieces)},
            "merges": _merges(model),
        },
    }
    special = {"unk_token": model.trainer_spec.unk_id, "bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        **{key: model.pieces[i].piece for key, i in special.items() if i is not None},
    }
    return {"tokenizer.json": json.dumps(whole, ensure_ascii=False), "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def _check(tokenizer: Tokenizer, model: sentencepiece_model_pb2.ModelProto) -> None:
    spec = model.normalizer_spec
    if model.trainer_spec.model_type != BPE:
        fault = "it is no BPE model"
    elif spec.precompiled_charsmap:
        fault = f"its normaliser {spec.name} rewrites characters"
    elif spec.remove_extra_whitespaces:
        fault = "its normaliser removes spaces"
    elif not spec.escape_whitespaces or model.trainer_spec.treat_whitespace_as_suffix:
        fault = "it does not spell a space as a mark before the word"
    elif any(piece.type in (USER, UNUSED) for piece in model.pieces):
        fault = "it has pieces that the user defined, or that are not used"
    else:
        return
    raise TokenizerError(
        f"the tokenizer {tokenizer.file} cannot be written for transformers: {fault}; read tokenizer.model with sentencepiece"
    )


def _merges(model: sentencepiece_model_pb2.ModelProto) -> list[list[str]]:
    """Every cut of a piece into two pieces, best score first; equal scores by id, as sentencepiece numbers them in the order learned."""
    ids = {piece.piece: i for i, piece in enumerate(model.pieces) if piece.type == NORMAL}
    ranked = []
    for text, i in ids.items():
        cuts = [(text[:at], text[at:]) for at in range(1, len(text))]
        ranked += [(-model.pieces[i].score, i, ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids]
    return [[left, right] for *_, left, right in sorted(ranked)]


def _added(i: int, text: str) -> dict:
    return {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def _normalizer(model: sentencepiece_model_pb2.ModelProto) -> dict:
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if not model.normalizer_spec.add_dummy_prefix:
        return spaces
    return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}


def _decoder(model: sentencepiece_model_pb2.ModelProto) -> dict:
    steps = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.normalizer_spec.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}
