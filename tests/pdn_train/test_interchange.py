"""Weights under flash-linear-attention's names come back bit for bit; its own classes take them; what cannot be said there is refused.

The tests that ask its classes need flash-linear-attention and transformers, no GPU (only its kernels do):

    pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0 einops && pip install transformers
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.gates import head_gates
from pdn_train import export, import_fla, interchange, weights
from pdn_train.config import ModelConfig
from pdn_train.hf_tokenizer import to_json
from pdn_train.tokenizer import PROBE, Tokenizer, TokenizerError
from pdn_train.weights import SINGLE, WeightsError

# head_dim x num_heads is not hidden_size, as in the 1B KDA
KINDS = {name: {"recurrence": name, "head_dim": 24} for name in ("dn", "gdn", "kda", "pdn", "pgdn", "pkda")} | {
    "tied gates": {"recurrence": "pgdn", "tie_gates": True},
    "pdn tied": {"recurrence": "pdn", "tie_gates": True, "precond_bound": 1.25},
    "untied head": {"recurrence": "gdn", "tie_embeddings": False, "neg_eigval": True, "norm_eps": 1e-5},
}
every = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def folders(tmp_path, make_run, make_model, tiny_tokenizer):
    """folders(kind, **changes) -> (the model, a run of it, its fla export)"""

    def make(kind: str, **changes):
        model = make_model(**(KINDS[kind] | {"vocab_size": 512} | changes))
        run = make_run(tmp_path / "run", model, {"seq_len": 48, "reset_at_documents": True}, tiny_tokenizer)
        export.export(run, tmp_path / "fla", format="fla")
        return model, run, tmp_path / "fla"

    return make


def equal(a: dict, b: dict) -> bool:
    return set(a) == set(b) and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


# ---- there and back ----


@every
def test_a_round_trip_gives_every_bit_and_the_configuration_back(folders, tmp_path, kind):
    model, run, folder = folders(kind)
    import_fla.import_fla(folder, tmp_path / "back")
    own = weights.find(tmp_path / "back")
    assert own.format == "safetensors" and own.data == {"seq_len": 48, "reset_at_documents": True}
    assert equal(own.weights(), model.state_dict())
    assert equal(weights.load_weights(folder), model.state_dict())  # the folder itself can be used too
    assert weights.find(folder).model == own.model == model.config.model_copy(update={"intermediate_size": 48})
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == (run / "tokenizer.model").read_bytes()


@every
def test_the_table_covers_every_row_once(make_model, kind):
    model = make_model(**KINDS[kind])
    rows: dict[str, list] = {}
    for piece in interchange.pieces(model.config):
        rows.setdefault(piece.here, []).append((piece.start, piece.stop))
    for name, tensor in model.state_dict().items():
        cuts = sorted(rows[name])
        assert cuts[0][0] == 0 and cuts[-1][1] == len(tensor), name
        assert all(stop == start for (_, stop), (start, _) in zip(cuts, cuts[1:], strict=False))


@pytest.mark.parametrize("kind", ["kda", "pdn", "untied head"])
def test_cut_into_files_nothing_is_missing_or_zero(folders, tmp_path, kind):
    """Both names of a tied head, every tensor whole, whatever the limit (DeepSpeed#1896, #3824, #6791)."""
    model, run, whole = folders(kind)
    export.export(run, tmp_path / "cut", 9_000, "fla")
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 3 and equal(stored, load_file(whole / SINGLE)) and equal(weights.load_weights(tmp_path / "cut"), model.state_dict())
    absent = ("a_proj.weight", "attn.dt_bias") if kind == "pdn" else ()  # the decay that a pdn has not
    assert all(tensor.any() for name, tensor in stored.items() if not name.endswith(absent or "?"))
    assert torch.equal(stored["lm_head.weight"], stored["model.embeddings.weight"]) == (kind != "untied head")


def test_rows_go_where_the_names_say(folders):
    model, _, folder = folders("pkda")
    stored, mixer = load_file(folder / SINGLE), model.blocks[1].mixer
    width = mixer.width
    assert torch.equal(stored["model.layers.1.attn.k_proj.weight"], mixer.in_proj.weight[width : 2 * width])
    assert torch.equal(stored["model.layers.1.attn.v_conv1d.weight"][:, 0], mixer.conv_weight[2 * width :])
    assert torch.equal(stored["model.layers.1.mlp.up_proj.weight"], model.blocks[1].mlp.gate_up_proj.weight[48:])
    names = ("f_proj.0", "g_proj.0", "b_proj", "a_proj", "b_atk_proj")  # the columns decay, gate, beta, precond_decay, precond_gain
    parts = mixer.in_proj.weight.split(list(mixer.input_columns.values()))[3:]
    assert all(torch.equal(stored[f"model.layers.1.attn.{n}.weight"], part) for n, part in zip(names, parts, strict=True))
    assert torch.equal(stored["lm_head.weight"], stored["model.embeddings.weight"])


def test_pdn_goes_as_a_pgdn_that_computes_the_same(folders, tmp_path):
    """Without its mark the folder is a PGDN; its decay is exactly 1, so that in fp64 only the order of sums differs."""
    model, _, folder = folders("pdn")
    tree = json.loads((folder / "config.json").read_text())
    del tree["pdn_train"]
    (folder / "config.json").write_text(json.dumps(tree))
    as_pgdn, _ = weights.load_model(folder, "cpu")
    assert as_pgdn.config.recurrence == "pgdn"
    ids = torch.randint(0, 512, (2, 70), generator=torch.Generator().manual_seed(0))
    mixer = as_pgdn.blocks[0].mixer
    with torch.no_grad():
        made = head_gates(mixer.in_proj(torch.randn(1, 70, 32)), mixer.columns, mixer._gate_parameters())
        assert torch.equal(made.decay.exp(), torch.ones(1, 70, 2))
        error = as_pgdn.double()(ids) - model.double()(ids)
        assert error.abs().max() < 1e-12 * model(ids).abs().max()


# ---- refusals ----


@pytest.mark.parametrize("change", [{"precond_form": "atq"}, {"precond_interval": "up"}], ids=str)
def test_ablations_have_no_class_there(folders, change, tmp_path):
    with pytest.raises(WeightsError, match=f"model.{next(iter(change))}=.* the form squashed in the interval both only"):
        folders("pgdn", **change)
    assert not (tmp_path / "fla").exists()


@pytest.mark.parametrize(
    "kind, key, value, message",
    [
        ("gdn", "use_gate", True, "use_gate=True in config.json: this project's gdn has False"),
        ("gdn", "model_type", "gla", "model_type='gla': there are delta_net, gated_deltanet"),
        ("gdn", "conv_size", 3, "conv_size=3 in config.json"),
        ("gdn", "hidden_size", 48, r"attn_norm.weight is \(32,\) there, its config.json asks for \(48,\)|embeddings.weight is"),
        ("kda", "lower_bound", -5, "lower_bound=-5 in config.json: this project's kda has None"),
        ("dn", "qk_norm", "sum", "qk_norm='sum'"),
        ("dn", "num_heads", 0, "num_heads=0 in config.json is no number above 0"),
        ("gdn", "head_dim", "64", "head_dim='64' in config.json is no number above 0"),
        ("gdn", "norm_eps", None, "config.json has no norm_eps"),
        ("gdn", "vocab_size", "512", "vocab_size='512': input should be a valid integer$"),
        ("gdn", "pdn_train", [], "config.json, or its key pdn_train, is no object"),
        ("gdn", "pdn_train", {"seq_len": "48"}, "data.seq_len='48' is not a whole number above 0"),
        ("gdn", "pdn_train", {"reset_at_documents": 1}, "data.reset_at_documents=1 is not true or false"),
        ("pgdn", "pdn_train", {"recurrence": "pdn"}, "a_proj.weight is not what pdn makes of it"),
        ("pgdn", "pdn_train", {"recurrence": "pgdn", "tie_gates": True}, r"a_atk_proj.weight has no place|\(.*there|is not what"),
    ],
)
def test_a_folder_of_another_kind_says_what_differs(folders, kind, key, value, message):
    _, _, folder = folders(kind)
    tree = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(WeightsError, match=message):
        weights.load_weights(folder)


def test_a_length_of_null_is_none(folders):
    _, _, folder = folders("gdn")
    tree = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": None, "pdn_train": {}}
    (folder / "config.json").write_text(json.dumps(tree))
    assert weights.find(folder).data == {}
    (folder / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match="is no object"):
        weights.find(folder)


def test_tensors_missing_or_too_many_are_named(folders, tmp_path, capsys):
    _, run, folder = folders("pgdn")
    stored = load_file(folder / SINGLE)
    name = "model.layers.0.attn.log_atk_scale"
    save_file({n: t for n, t in stored.items() if n != name}, folder / SINGLE)
    assert import_fla.main([str(folder), str(tmp_path / "back")]) == 1
    assert f"{name} is None there, its config.json asks for (2,)" in capsys.readouterr().err
    save_file(stored | {"model.layers.0.attn.g_proj.weight": torch.ones(2)}, folder / SINGLE)
    assert import_fla.main([str(folder), str(tmp_path / "back")]) == 1
    assert "model.layers.0.attn.g_proj.weight has no place in a pgdn model here" in capsys.readouterr().err
    assert import_fla.main([str(run), str(tmp_path / "back")]) == 1
    assert "has no config.json" in capsys.readouterr().err and not (tmp_path / "back").exists()


def test_import_in_files_of_a_size(folders, tmp_path, capsys):
    model, _, folder = folders("pgdn")
    assert import_fla.main([str(folder), str(tmp_path / "back"), "--max-shard-size", "0"]) == 1
    assert "--max-shard-size 0.0 is no finite number above 0" in capsys.readouterr().err
    assert import_fla.main([str(folder), str(tmp_path / "back"), "--max-shard-size", "0.01"]) == 0
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert equal(weights.find(tmp_path / "back").weights(), model.state_dict())


# ---- the tokenizer's files ----


def test_merges_hold_every_cut_best_first(tiny_tokenizer):
    tree = json.loads(to_json(Tokenizer.load(tiny_tokenizer))["tokenizer.json"])
    vocabulary, merges = tree["model"]["vocab"], tree["model"]["merges"]
    made = [vocabulary[left + right] for left, right in merges]
    assert made == sorted(made) and all(left in vocabulary and right in vocabulary for left, right in merges)
    longest = max((p for p in vocabulary if not p.startswith("<")), key=len)
    assert sum(left + right == longest for left, right in merges) >= 1
    assert [t["content"] for t in tree["added_tokens"]] == ["<unk>", "<s>", "</s>"]


def test_a_tokenizer_that_rewrites_text_is_not_written(folders, tmp_path, documents, capsys):
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("\n".join(documents))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "plain"), model_type="bpe", vocab_size=400, minloglevel=2
    )
    with pytest.raises(TokenizerError, match="its normaliser nmt_nfkc rewrites characters; read tokenizer.model with sentencepiece"):
        to_json(Tokenizer.load(tmp_path / "plain.model"))


# ---- the classes themselves ----


@every
def test_its_classes_take_every_tensor(folders, kind):
    """AutoModelForCausalLM loads the folder, no name missing or left over; its parameters are the stored ones, and the tie is kept."""
    pytest.importorskip("fla")
    transformers = pytest.importorskip("transformers")
    _, _, folder = folders(kind)
    model, said = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    assert equal({n: t.detach() for n, t in model.state_dict().items()}, load_file(folder / SINGLE))
    assert (model.lm_head.weight is model.model.embeddings.weight) == KINDS[kind].get("tie_embeddings", True)
    tree = json.loads((folder / "config.json").read_text())
    assert {key: getattr(model.config, key) for key in tree if key != "dtype"} == {key: tree[key] for key in tree if key != "dtype"}


@pytest.mark.parametrize("kind", ["dn", "gdn", "kda", "pgdn", "pkda", "untied head"])
def test_what_it_saves_can_be_read(folders, tmp_path, kind):
    """save_pretrained keeps one name of a tied head and leaves out fields that have their default."""
    pytest.importorskip("fla")
    transformers = pytest.importorskip("transformers")
    ours, _, folder = folders(kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    del model.config.pdn_train
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert equal(weights.load_weights(tmp_path / "saved"), ours.state_dict())
    assert weights.find(tmp_path / "saved").model == ModelConfig(**ours.config.model_dump() | {"intermediate_size": 48})


def test_transformers_reads_the_same_ids(folders, documents):
    transformers = pytest.importorskip("transformers")
    _, run, folder = folders("gdn")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(folder)), Tokenizer.load(run / "tokenizer.model")
    for text in [PROBE, "", "  a", "</s> <s> <unk>", *documents[:50]]:
        assert theirs(text)["input_ids"] == ours.encode(text), text
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eos_id, ours.bos_id)
