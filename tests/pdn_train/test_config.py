"""Configuration: precedence, types as meant, and errors that name the key, the value and the way out."""

from __future__ import annotations

import pytest

from pdn_train.config import ConfigError, build, changed, dump, keys, load

MINIMAL = "run_dir: runs/x\ndata: {path: shards}\n"


@pytest.fixture
def write(tmp_path):
    def act(text: str = MINIMAL) -> str:
        (tmp_path / "x.yaml").write_text(text)
        return str(tmp_path / "x.yaml")

    return act


def test_defaults_then_file_then_command_line(write):
    path = write(MINIMAL + "train: {steps: 5000, seed: 7}\n")
    config = load(path, ["train.steps=2000", "optim.lr=3e-4"])
    assert (config.train.steps, config.train.seed, config.train.micro_batch) == (2000, 7, 16)
    assert config.optim.lr == 3e-4


@pytest.mark.parametrize("text, value", [("3e-4", 3e-4), ("3.e-4", 3e-4), (".5", 0.5), ("1", 1.0), ("-0", None), ("1e-3", 1e-3)])
def test_numbers_are_read_as_meant(write, text, value):
    if value is None:
        assert load(write(), [f"optim.weight_decay={text}"]).optim.weight_decay == 0
    else:
        assert load(write(), ["optim.min_lr=0", "optim.warmup_start=0", f"optim.lr={text}"]).optim.lr == value


def test_a_count_written_with_an_exponent_is_a_count(write):
    steps = load(write(), ["train.steps=1e4"]).train.steps
    assert (steps, type(steps)) == (10000, int)


REFUSED = [
    ("optim: {gradient_cliping: 1.0}", ["unknown key 'optim.gradient_cliping'", "1.0", "did you mean 'optim.clip'"]),
    ("optim: {warmup_steps: 012}", ["optim.warmup_steps", "'012'", "integer"]),
    ("train: {activation_checkpoint: off}", ["train.activation_checkpoint", "'off'", "'none'"]),
    ("train: {total_steps: 1e4}", ["unknown key 'train.total_steps'", "did you mean 'train.steps'"]),
    ("optim: {lr: 3e-4, lr: 1e-3}", ["'lr' stands twice"]),
    ("optim: {lr: abc}", ["optim.lr", "'abc'", "number"]),
    ("optim: {lr: '3e-4'}", ["optim.lr", "'3e-4'"]),
    ("optim: {lr: .nan}", ["optim.lr", "'.nan'"]),
    ("train: {steps: 1.5}", ["train.steps", "1.5"]),
    ("train: {steps: true}", ["train.steps", "True"]),
    ("train: {compile: 1}", ["train.compile", "1", "boolean"]),
    ("model: {recurrence: mamba}", ["model.recurrence", "'mamba'", "'pgdn'"]),
    ("model: {head_dim: 8}", ["model.head_dim", "8", "16"]),
    ("model: {head_dim: 512}", ["model.head_dim", "512", "256"]),
    ("modell: {head_dim: 64}", ["unknown key 'modell'", "did you mean 'model'"]),
    ("parallel: {zero: 0}", ["parallel.zero=0", "bf16", "use parallel.zero=1"]),
    ("parallel: {zero: 4}", ["parallel.zero", "4"]),
    ("model: {neg_eigval: true}", ["model.neg_eigval", "precond_bound=1.5", "3.0 > 2"]),
    ("model: {recurrence: gdn, tie_gates: true}", ["model.tie_gates", "gdn"]),
    ("model: {channel_dt: log_uniform}", ["model.channel_dt=log_uniform", "kda, pkda", "not pgdn"]),
    ("model: {recurrence: gdn, precond_form: atq}", ["model.precond_form", "gdn"]),
    ("model: {kernel: triton, precond_interval: up}", ["model.precond_interval", "model.kernel=torch"]),
    ("model: {precond_form: atq, precond_interval: up}", ["model.precond_interval=up", "atq", "use both"]),
    ("parallel: {sequence: 3}", ["parallel.sequence=3", "data.seq_len=2048"]),
    ("parallel: {sequence: 2}\ntrain: {compile: true}", ["train.compile=true", "parallel.sequence=2", "use one of them"]),
    ("parallel: {sequence: 1024}", ["parallel.sequence=1024", "2 tokens", "needs 3"]),
    ("train: {compile: true, activation_checkpoint: selective}", ["train.compile=true", "selective", "use none or block"]),
    ("train: {compile: true}\ndata: {reset_at_documents: true, path: x}", ["train.compile=true", "data.reset_at_documents=true"]),
    ("resume: {allow: [optim.rl]}", ["resume.allow", "'optim.rl'", "did you mean 'optim.lr'"]),
    ("profile: {start: 2, stop: 40000}", ["profile.stop=40000", "train.steps=30000"]),
    ("optim: {eps: 1e999}", ["optim.eps"]),
    ("optim: {schedule: wsd}", ["optim.decay_steps"]),
    ("train: {steps: 100}", ["optim.warmup_steps=1024", "train.steps=100", "lower one of them, or take more steps"]),
    ("eval: {every: 10}", ["data.val_path"]),
    ("activation_checkpoint: block", ["unknown key 'activation_checkpoint' (value 'block'); did you mean 'train.activation_checkpoint'?"]),
    ("train: {zero_stage: 7}", ["unknown key 'train.zero_stage' (value 7); did you mean 'parallel.zero'?"]),
    ("seed: 1", ["did you mean 'data.seed' or 'train.seed'?"]),
    ("optim: {every: 1}", ["did you mean 'checkpoint.every' or 'eval.every' or 'log.every'?"]),
    ("eval: {evry: 1}", ["did you mean 'eval.every'?"]),
    ("eval_every: 1", ["did you mean 'eval.every'?"]),
    ("optim: {max_steps: 1}", ["did you mean 'train.steps'?"]),
    ("resume: {allow: [lr]}", ["resume.allow", "'lr'", "did you mean 'optim.lr'"]),
    ("[1, 2]", ["mapping"]),
    ("a: [1", ["x.yaml"]),
    ("a: {{ run }}", ["x.yaml", "line 1", "quote"]),
    ("? [a]", ["x.yaml", "line 1"]),
    ("a: !!int abc", ["x.yaml: line 1: 'abc' is no !!int"]),
    ("a: !!bool abc", ["x.yaml: line 1: 'abc' is no !!bool"]),
    ("a: !!int ''", ["x.yaml: line 1: '' is no !!int"]),
    ("a: !!timestamp abc", ["x.yaml: line 1: 'abc' is no !!timestamp"]),
    ("a: !!map abc", ["x.yaml", "mapping"]),
    ("a: " + "[" * 1000, ["x.yaml", "hundreds deep"]),
]


@pytest.mark.parametrize("text, said", REFUSED, ids=[text[:60] for text, _ in REFUSED])
def test_refused_with_key_value_and_way_out(write, text, said):
    with pytest.raises(ConfigError) as caught:
        whole = text.startswith(("[", "a:", "?"))
        load(write(text if whole else ("run_dir: r\n" if "data:" in text else MINIMAL) + text + "\n"))
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "item, said",
    [
        ("optim.lr", "section.key=value"),
        ("run_dir.x=1", "run_dir is a value"),
        ("lr=1", "did you mean 'optim.lr'"),
        ("run_dir=null", "run_dir=None: .*stands in quotes"),
        ("run_dir=", "run_dir='': .*at least 1 character"),
        ("run_dir=a\udcff", "is not UTF-8: give run_dir"),
        ("data.path={}", "names no folder: give a folder"),
    ],
)
def test_bad_overrides(write, item, said):
    with pytest.raises(ConfigError, match=said):
        load(write(), [item])


@pytest.mark.parametrize(
    "text, value",
    [
        ("runs/a #b", "runs/a #b"),
        ("1e3", "1e3"),
        ("7", "7"),
        ("true", "true"),
        ("2026-12-01", "2026-12-01"),
        ("a: b", "a: b"),
        ("'quoted #1'", "quoted #1"),
        ('"null"', "null"),
        ("'a' #b", "'a' #b"),
        ("'a' and 'b'", "'a' and 'b'"),
        ("'it''s'", "it's"),
        (r'"a \" # b"', 'a " # b'),
        ("[x]", "[x]"),
    ],
)
def test_an_override_of_text_is_taken_as_it_stands(write, text, value):
    config = load(write(), [f"run_dir={text}", f"data.path={text}", f"init_from={text}"])
    assert (config.run_dir, config.data.path, config.init_from) == (value, value, value)


def test_an_override_of_text_or_something_else_is_yaml_where_it_is_no_text(write):
    config = load(write(), ["data.path={a: 1, b: 2}", "init_from=null", "model.tie_embeddings=false", "optim.lr=3e-4 # as before"])
    assert config.data.path == {"a": 1, "b": 2} and config.init_from is None
    assert load(write(), ["resume.allow= [optim.lr] # one"]).resume.allow == ["optim.lr"]
    assert not config.model.tie_embeddings and config.optim.lr == 3e-4


def test_what_is_not_the_default_is_known(write):
    config = load(write(), ["optim.betas=[0.9, 0.99]", "train.seed=0", "log.every=10", "launch.nodes=1"])
    assert changed(config) == {**changed(load(write())), "optim.betas": (0.9, 0.99), "train.seed": 0}
    assert "run_dir" in changed(config)


@pytest.mark.parametrize("text, items", [("launch:", []), ("launch: ~", []), ("launch:", ["launch.nodes=2"]), ("", ["launch=null"])])
def test_a_section_without_keys_has_its_defaults(text, items, write):
    assert load(write(MINIMAL + text), items) == load(write(), [item for item in items if item != "launch=null"])


def test_an_integer_fits_int64(write):
    assert load(write(), [f"train.seed={2**63 - 1}"]).train.seed == 2**63 - 1
    for value in ("9223372036854775808", "99999999999999999999", "1e30"):
        with pytest.raises(ConfigError, match=r"train\.seed=.*less than or equal to 9223372036854775807"):
            load(write(), [f"train.seed={value}"])


def test_an_override_has_the_suggestion_too(write):
    for item, meant in (("activation_checkpoint=block", "train.activation_checkpoint"), ("train.zero_stage=7", "parallel.zero")):
        with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
            load(write(), [item])


@pytest.mark.parametrize(
    "item, meant",
    [
        ("gradient_cliping=1.0", "'optim.clip'"),
        ("learning_rate=1", "'optim.lr'"),
        ("optim.learnin_rate=1", "'optim.lr'"),
        ("train.batch_size=8", "'train.micro_batch' or 'train.global_batch'"),
        ("checkpoint.interval=8", "'checkpoint.every'"),
        ("model.d_model=8", "'model.hidden_size'"),
        ("parallel.sp=2", "'parallel.sequence'"),
        ("interval=8", "'checkpoint.every' or 'eval.every' or 'log.every'"),
    ],
)
def test_what_others_call_a_key(item, meant, write):
    with pytest.raises(ConfigError) as caught:
        load(write(), [item])
    assert str(caught.value).endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("item", ["folder=x", "tp=x"])
def test_what_is_like_no_key_has_no_suggestion(item, write):
    with pytest.raises(ConfigError) as caught:
        load(write(), [item])
    assert "unknown key" in str(caught.value) and "did you mean" not in str(caught.value)


def test_a_sweep_is_named_as_one(write):
    """Whatever else stands in it: its keys are not guessed at as misspelt ones of a run."""
    path = write("base: a.yaml\nfolder: r\nseeds: [1]\nvariants: {gdn: [model.recurrence=gdn]}\n")
    with pytest.raises(ConfigError) as caught:
        load(path, ["train.steps=5"])
    assert str(caught.value) == f"{path} is a sweep of many runs (it has base, seeds, variants), for `python -m pdn_train.sweep {path}`"


@pytest.mark.parametrize("text", ["modell: {text}", "model: {{hidden_size: {text}}}"])
def test_a_long_value_is_cut(write, text):
    """100 letters: 56 of them, with the quote before and the dots, are the 60 characters."""
    with pytest.raises(ConfigError) as caught:
        load(write(MINIMAL + text.format(text=100 * "q") + "\n"))
    assert f"'{56 * 'q'}..." in str(caught.value) and 57 * "q" not in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="the configuration .*nowhere.yaml does not exist; name a YAML file, such as"):
        load(tmp_path / "nowhere.yaml")
    (tmp_path / "pgdn_340m.yaml").touch()
    (tmp_path / "other.yaml").touch()
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "pgdn_34m.yaml")
    assert str(caught.value) == f"the configuration {tmp_path}/pgdn_34m.yaml does not exist; did you mean {tmp_path}/pgdn_340m.yaml?"


def test_neg_eigval_is_fine_without_a_preconditioner_or_with_bound_one(write):
    assert load(write(), ["model.recurrence=gdn", "model.neg_eigval=true"]).model.neg_eigval
    assert load(write(), ["model.neg_eigval=true", "model.precond_bound=1"]).model.neg_eigval


def test_dump_reads_back_as_the_same_configuration(write, tmp_path):
    config = load(
        write(), ["data.path={a: 1, b: 2.5}", "optim.betas=[0.9, 0.99]", "launch.setup=['module load x', '1e4']", "init_from='1e-3'"]
    )
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load(tmp_path / "again.yaml") == config


def test_batch_arithmetic_names_both_products():
    config = build({"run_dir": "r", "data": {"path": "d"}, "train": {"micro_batch": 3, "global_batch": 256}}, "test")
    with pytest.raises(ConfigError, match=r"global_batch=256 .*micro_batch=3 x 2 data-parallel ranks = 6.* 252 and 258"):
        config.accumulation(2)
    assert config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 252})}).accumulation(2) == 42


def test_sequence_ranks_are_not_data_ranks():
    config = build(
        {"run_dir": "r", "data": {"path": "d"}, "parallel": {"sequence": 2}, "train": {"micro_batch": 1, "global_batch": 4}}, "test"
    )
    assert (config.data_parallel(4), config.accumulation(4)) == (2, 2)
    with pytest.raises(ConfigError, match="world of 3 ranks"):
        config.data_parallel(3)


def test_every_contract_key_exists():
    wanted = """
    model.recurrence model.hidden_size model.num_layers model.num_heads model.head_dim model.vocab_size model.kernel
    model.neg_eigval model.tie_gates model.precond_bound model.precond_form model.precond_interval data.path data.val_path
    data.seq_len data.seed data.reset_at_documents optim.lr optim.min_lr optim.warmup_steps optim.warmup_start
    optim.decay_steps optim.schedule optim.betas optim.eps optim.weight_decay optim.decay_all optim.clip train.steps
    train.micro_batch train.global_batch train.seed train.precision train.activation_checkpoint train.compile
    train.max_nonfinite parallel.sequence parallel.zero checkpoint.every checkpoint.keep checkpoint.keep_every checkpoint.background
    eval.every log.every launch.cluster launch.nodes launch.gpus_per_node launch.cpus_per_task launch.minutes launch.partition
    launch.account launch.constraint launch.requeue launch.setup launch.max_requeues launch.hang_seconds launch.sbatch_extra
    init_from resume.allow profile.start profile.stop run_dir
    """
    assert set(wanted.split()) <= set(keys())
