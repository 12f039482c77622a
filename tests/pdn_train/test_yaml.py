"""The presets: each loads, says how to run it, has the size of its name and fits its machine; the paper's have its settings."""

import re
from pathlib import Path

import pytest

from pdn_train import config, estimate

FOLDER = Path(__file__).resolve().parents[2] / "yaml"
FILES = sorted(file for file in FOLDER.glob("*.yaml") if not file.stem.startswith("sweep_"))  # those: test_sweep.py
PAPER = {"dn_340m", "gdn_340m", "pdn_340m", "pgdn_340m", "kda_355m", "pkda_355m", "gdn_1b", "pgdn_1b", "kda_1b", "pkda_1b"}
every = pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
papers = pytest.mark.parametrize("name", sorted(PAPER))


def load(name: str) -> config.Config:
    return config.load(FOLDER / f"{name}.yaml")


def test_the_folder_holds_yaml_files_only():
    """Anything importable in it would hide PyYAML under `python -m`."""
    assert {path.suffix for path in FOLDER.iterdir()} == {".yaml"}
    assert PAPER | {"pgdn_tiny"} <= {file.stem for file in FILES}


@every
def test_it_opens_with_its_command_machine_time_and_loss(file):
    comment = re.match(r"(#.*\n)+", file.read_text()).group()
    assert re.search(rf"-m pdn_train\.train yaml/{file.name}\b", comment)
    for word in ("Machine:", "Time:", "oss:"):
        assert word in comment, word
    for other in re.findall(r"yaml/(\w+)\.yaml", comment):
        assert other == file.stem


@every
def test_it_loads_and_its_batch_and_memory_fit_the_machine(file):
    run = config.load(file)
    world = run.launch.nodes * run.launch.gpus_per_node
    assert run.accumulation(world) >= 1
    assert sum(estimate.memory_per_gpu(run, world).values()) < 75e9  # of 80 GB
    assert run.run_dir.startswith("runs/")
    assert run.model.recurrence == file.stem.partition("_")[0]


def test_run_folders_differ():
    assert len({config.load(file).run_dir for file in FILES}) == len(FILES)


@papers
def test_the_size_is_that_of_the_name(name):
    number, unit = re.fullmatch(r"\w+_(\d+)([mb])", name).groups()
    said = int(number) * {"m": 1e6, "b": 1e9}[unit]
    assert estimate.parameters(load(name).model) == pytest.approx(said, rel=0.01)


@papers
def test_the_papers_settings(name):
    """docs/paper.md, section 4."""
    run = load(name)
    assert run.train.steps == (95_000 if name.endswith("1b") else 30_000)
    assert run.train.global_batch * run.data.seq_len == 524_288 and run.data.seq_len == 2048
    optim = run.optim
    assert (optim.lr, optim.min_lr, optim.warmup_start, optim.warmup_steps, optim.schedule) == (4e-4, 4e-5, 4e-5, 1024, "cosine")
    assert (optim.betas, optim.eps, optim.weight_decay, optim.decay_all, optim.clip) == ((0.9, 0.95), 1e-8, 0.01, True, 1.0)
    assert (run.train.precision, run.train.seed, run.data.seed, run.data.reset_at_documents) == ("bf16", 42, 42, False)
    model = run.model
    assert (model.num_layers, model.vocab_size, model.tie_embeddings, model.precond_bound, model.norm_eps) == (24, 32_000, True, 1.5, 1e-6)
    assert not (model.tie_gates or model.neg_eigval)
    channel, large = model.mixer.decay == "channel", name.endswith("1b")
    assert model.mlp_size == (4864 if large else 2816)
    assert (model.hidden_size, model.num_heads, model.head_dim) == ((1792, 14, 120 if channel else 128) if large else (1024, 8, 128))


@pytest.mark.parametrize(
    "names",
    [("dn_340m", "pdn_340m", "gdn_340m", "pgdn_340m"), ("kda_355m", "pkda_355m"), ("gdn_1b", "pgdn_1b"), ("kda_1b", "pkda_1b")],
    ids=str,
)
def test_compared_runs_differ_in_the_recurrence_only(names):
    trees = [load(name).model_dump() for name in names]
    for tree in trees:
        del tree["run_dir"], tree["model"]["recurrence"]
    assert all(tree == trees[0] for tree in trees)
