"""Publication, choice and removal of checkpoints in one process; the ZeRO files themselves are tested with real processes in test_train."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pdn_train import publication, saving
from pdn_train.checkpoint import CheckpointError, Progress, folder_name, newest, read_whole
from pdn_train.config import Config, build
from pdn_train.resume import newest_whole, require_same_run, restore
from pdn_train.saving import Checkpoints
from pdn_train.world import World

WORLD = World(0, 0, 1, 1, torch.device("cpu"))
DATA = {"seed": 1, "folders": [{"manifest": "aa"}]}


class FilesOnly:
    """Stands in for the engine: two files, one larger than the other."""

    def files(self, folder: Path) -> list[tuple[Path, dict]]:
        return [(folder / f"part_{rank}.pt", {"weights": torch.arange(9.0 * (rank + 1))}) for rank in range(2)]


def config(**changes: dict) -> Config:
    tree = {"run_dir": "r", "data": {"path": "d"}, "train": {"steps": 3000, "precision": "fp32"}, "parallel": {"zero": 0}}
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    return build(tree, "test")


@pytest.fixture
def root(tmp_path):
    return tmp_path


def save(root: Path, *steps: int, **keep: int) -> Checkpoints:
    checkpoints = Checkpoints(root, config(checkpoint={"keep": 10, **keep}).checkpoint, WORLD)
    for step in steps:
        checkpoints.save(FilesOnly(), Progress(step, step * 4, step * 64), config(), DATA)
    checkpoints.finish()
    return checkpoints


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_a_published_checkpoint_is_whole(root):
    save(root, 1000)
    folder = root / "step_0000001000"
    assert names(root) == ["step_0000001000"]
    assert {"COMPLETE", "state.json", "rng_00000.pt"} <= set(names(folder))
    saved = newest_whole(root, WORLD)
    assert (saved.folder, saved.progress) == (folder, Progress(1000, 4000, 64000))
    assert newest(root) == folder


def test_no_checkpoint_ever_published_is_a_fresh_start(root):
    (root / "step_0000000100.tmp").mkdir()
    assert newest_whole(root, WORLD) is None
    assert names(root) == []
    assert newest_whole(root / "not there yet", WORLD) is None


def damage_missing(folder):
    (folder / "part_1.pt").unlink()


def damage_truncated(folder):
    file = folder / "part_1.pt"
    file.write_bytes(file.read_bytes()[:-1])


def damage_flipped_bit(folder):
    file = folder / "part_1.pt"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


def damage_unreadable(folder):
    """As a bad block would: the error is no FileNotFoundError."""
    (folder / "part_1.pt").unlink()
    (folder / "part_1.pt").symlink_to("part_1.pt")


def damage_no_complete(folder):
    (folder / "COMPLETE").unlink()


def damage_state(folder):
    (folder / "state.json").write_text((folder / "state.json").read_text().replace("1100", "1200"))


def damage_garbage_state(folder):
    (folder / "state.json").write_bytes(b"\xff\x00")


DAMAGES = [
    (damage_missing, "part_1.pt is missing"),
    (damage_truncated, "part_1.pt has "),
    (damage_flipped_bit, "another checksum"),
    (damage_unreadable, "part_1.pt cannot be read"),
    (damage_no_complete, "COMPLETE is missing"),
    (damage_state, "COMPLETE does not match"),
    (damage_garbage_state, "COMPLETE does not match"),
]


@pytest.mark.parametrize("damage, said", DAMAGES, ids=[d.__name__ for d, _ in DAMAGES])
def test_a_damaged_one_is_passed_over_for_the_one_before(root, caplog, damage, said):
    """Numbers, not names, decide: 900 < 1000 < 1100; 1100 is damaged, 1200 was never finished, `latest` lies."""
    save(root, 900, 1000, 1100)
    damage(root / folder_name(1100))
    (root / "step_1200.tmp").mkdir()
    (root / "latest").write_text("step_0000001100")
    with caplog.at_level(logging.WARNING):
        assert newest_whole(root, WORLD).progress.step == 1000
    assert "step_0000001100" in caplog.text and said in caplog.text
    assert newest(root).name == "step_0000001000"


@pytest.mark.parametrize(
    "key, value",
    [
        ("config", []),
        ("config.model", 3),
        ("config.data", None),
        ("files", []),
        ("files.part_0.pt", []),
        ("progress", {}),
        ("progress.step", "20"),
        ("progress.more", 1),
        ("world", {}),
        ("data", []),
        ("data.mqar", []),
    ],
)
def test_a_state_of_another_shape_is_passed_over(root, caplog, key, value):
    """Its mark fits: another program wrote it, or a hand."""
    save(root, 10, 20)
    state = root / folder_name(20) / "state.json"
    tree = json.loads(state.read_text())
    outer, _, inner = key.partition(".")
    if inner:
        tree[outer][inner] = value
    else:
        tree[outer] = value
    state.write_text(json.dumps(tree))
    publication.complete(state.parent, state.read_bytes())
    assert newest_whole(root, WORLD).progress.step == 10 and newest(root).name == folder_name(10)
    assert f"state.json cannot be read ({outer}" in caplog.text


def test_a_copy_under_a_later_step_s_name_is_passed_over(root, caplog):
    """Otherwise every resume would start there, however far training has come since."""
    save(root, 10, 20)
    shutil.copytree(root / folder_name(10), root / folder_name(50))
    shutil.copytree(root / folder_name(10), root / "step_best")
    assert newest_whole(root, WORLD).progress.step == 20 and newest(root).name == folder_name(20)
    assert "step_0000000050: state.json is of step 10" in caplog.text
    assert read_whole(root / "step_best")["progress"]["step"] == 10
    save(root, 50)
    assert newest_whole(root, WORLD).progress.step == 50


def test_what_took_the_name_of_an_unfinished_one_is_swept_away(root):
    save(root, 10)
    (root / "step_0000000020.tmp").touch()
    (root / "step_0000000030.tmp").symlink_to("nowhere")
    (root / "step_0000000040").touch()
    (root / "step_0000000040.publishing").mkdir()
    (root / "step_0000000050").mkdir()
    (root / "step_0000000050" / "state.json").write_text("null")
    (root / "step_0000000050.publishing").touch()
    publication.finish_publications(root)
    assert [path.name for path in root.iterdir()] == ["step_0000000010"]
    (root / "step_0000000020").touch()
    (root / "step_0000000030").symlink_to("nowhere")
    save(root, 20, 30)
    assert newest(root).name == folder_name(30)


def test_none_whole_is_an_error_not_a_fresh_start(root):
    save(root, 10, 20)
    for step in (10, 20):
        damage_flipped_bit(root / folder_name(step))
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole .*another checksum.*start afresh"):
        newest_whole(root, WORLD)
    with pytest.raises(CheckpointError):
        newest(root)


def test_one_of_another_version_is_refused_with_the_way_out(root, monkeypatch):
    """Its weights have other names: nothing of it may be loaded."""
    monkeypatch.setattr(saving, "VERSION", 1)
    save(root, 10)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="version 1, this code reads 3: go on with the code that wrote it"):
        newest_whole(root, WORLD)


def test_the_newest_are_kept_and_the_milestones(root):
    save(root, 1000, 2000, 2500, 3000, 3500, 4000, keep=2, keep_every=2000)
    assert names(root) == [folder_name(s) for s in (2000, 3000, 3500, 4000)]


def test_damaged_later_ones_do_not_push_out_what_is_saved_after_them(root):
    save(root, 4, 6, keep=1, keep_every=4)
    damage_flipped_bit(root / folder_name(6))
    save(root, 5, keep=1, keep_every=4)
    assert newest_whole(root, WORLD).progress.step == 5


def test_somebody_s_own_copies_and_links_outlive_what_is_kept(root, tmp_path_factory):
    """A copy under another step's name, whole or not, neither counts nor goes; of a link to a checkpoint elsewhere, or to the rest of one,
    the link goes.
    """
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    save(elsewhere, 10, 20)
    (elsewhere / folder_name(20) / "COMPLETE").unlink()
    for step in (10, 20):
        (root / folder_name(step)).symlink_to(elsewhere / folder_name(step))
    save(root, 30, 40)
    for step in (45, 46):
        shutil.copytree(root / folder_name(30), root / folder_name(step))
    damage_no_complete(root / folder_name(46))
    save(root, 50, keep=2)
    assert names(root) == [folder_name(step) for step in (40, 45, 46, 50)]
    assert read_whole(elsewhere / folder_name(10)) and (elsewhere / folder_name(20)).is_dir()


def test_a_publication_is_not_finished_behind_a_link(root, tmp_path_factory):
    """It stands where a checkpoint did whose publication was cut short; its files may still be on their way."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    save(elsewhere, 10)
    damage_no_complete(elsewhere / folder_name(10))
    (root / folder_name(10)).symlink_to(elsewhere / folder_name(10))
    (root / (folder_name(10) + ".publishing")).touch()
    publication.finish_publications(root)
    assert names(root) == [folder_name(10)] and "COMPLETE" not in names(elsewhere / folder_name(10))


@pytest.mark.parametrize("ending", ["", ".tmp", ".universal", ".publishing"])
def test_a_link_by_any_name_of_a_checkpoint_is_removed_alone(root, tmp_path_factory, ending):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    save(elsewhere, 10)
    (root / (folder_name(30) + ending)).symlink_to(elsewhere / folder_name(10))
    publication.finish_publications(root)
    save(root, 30)
    assert names(root) == [folder_name(30)] and not (root / folder_name(30)).is_symlink()
    assert read_whole(elsewhere / folder_name(10))


def test_saving_the_same_step_again_replaces_it(root):
    save(root, 10)
    damage_flipped_bit(root / folder_name(10))
    save(root, 10)
    assert newest_whole(root, WORLD).progress.step == 10


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["before rename", "before COMPLETE", "after COMPLETE"])
def test_a_kill_at_any_moment_of_publication_loses_nothing(root, monkeypatch, moment):
    save(root, 10)

    def die(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "before rename":
            patch.setattr(Path, "rename", die)
        elif moment == "before COMPLETE":
            patch.setattr(publication, "complete", die)
        else:
            patch.setattr(publication, "prune", die)
        with pytest.raises(Killed):
            save(root, 20)
    assert newest_whole(root, WORLD).progress.step == (10 if moment == "before rename" else 20)
    assert names(root) == [folder_name(s) for s in ((10,) if moment == "before rename" else (10, 20))]


def test_an_interrupted_first_publication_that_is_not_whole_is_a_fresh_start(root, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(publication, "complete", lambda *a: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            save(root, 20)
    damage_truncated(root / folder_name(20))
    assert newest_whole(root, WORLD) is None


def test_a_run_that_differs_is_refused_with_every_difference(root):
    save(root, 10)
    saved = newest_whole(root, WORLD)
    require_same_run(saved, config(checkpoint={"every": 7}, log={"every": 1}, parallel={"zero": 2}, train={"steps": 9000}), DATA, WORLD)
    other = config(model={"num_layers": 2, "recurrence": "gdn"}, train={"global_batch": 512}, data={"seed": 9})
    with pytest.raises(CheckpointError) as caught:
        require_same_run(saved, other, {**DATA, "seed": 9}, WORLD)
    for part in (
        "model.num_layers: 24 then, 2 now",
        "model.recurrence: 'pgdn' then, 'gdn' now",
        "train.global_batch: 256 then, 512 now",
        "seed 1 then, 9 now",
    ):
        assert part in str(caught.value)
    del saved.state["config"]["train"]["steps"]
    del saved.state["config"]["model"]["channel_dt"]  # as in a checkpoint older than the key: it did what the default does
    require_same_run(saved, config(), DATA, WORLD)
    with pytest.raises(CheckpointError, match="model.channel_dt: 'zero' then, 'log_uniform' now"):
        require_same_run(saved, config(model={"recurrence": "kda", "channel_dt": "log_uniform"}), DATA, WORLD)
    allowed = config(optim={"lr": 1e-3}, resume={"allow": ["optim.lr"]})
    require_same_run(saved, allowed, DATA, WORLD)
    with pytest.raises(CheckpointError, match="optim.lr: 0.0004 then, 0.001 now"):
        require_same_run(saved, config(optim={"lr": 1e-3}), DATA, WORLD)


def mixed(**weights: float) -> tuple[Config, dict]:
    """The run of a mixture, and its samples' fingerprint."""
    folders = [{"manifest": name[0], "tokens": 1000 * len(name), "weight": weight} for name, weight in weights.items()]
    return config(data={"path": weights}), {"folders": folders}


MQAR = (config(data={"path": None, "mqar_pairs": 4}), {"mqar": {"pairs": 4}})


@pytest.mark.parametrize(
    "then, now, said",
    [
        (mixed(a=3.0, b=1.0), mixed(a=3.0, b=2.0), "b has weight 1.0 then, 2.0 now"),
        (mixed(a=3.0, b=0.1234567), mixed(a=3.0, b=0.1234568), "b has weight 0.1234567 then, 0.1234568 now"),
        (mixed(a=3.0, b=1.0), mixed(cc=3.0, b=1.0), "cc has other shards (1,000 tokens then, 2,000 now)"),
        (
            mixed(a=3.0, b=1.0),
            mixed(cc=2.0, b=4.0),
            "cc has other shards (1,000 tokens then, 2,000 now) and weight 3.0 then, 2.0 now, b has weight 1.0 then, 4.0 now",
        ),
        (mixed(a=1.0), mixed(a=1.0, b=2.0), "a (weight 1.0) then, a (weight 1.0) + b (weight 2.0) now"),
        (mixed(a=3.0, b=1.0), mixed(b=1.0, a=3.0), "a (weight 3.0) + b (weight 1.0) then, b (weight 1.0) + a (weight 3.0) now"),
        (mixed(a=1.0), MQAR, "a (weight 1.0) then, no folder now, mqar None then, {'pairs': 4} now"),
    ],
)
def test_what_has_changed_of_a_mixture_is_named(root, then, now, said):
    """By its folder and without checksums."""
    checkpoints = Checkpoints(root, config().checkpoint, WORLD)
    checkpoints.save(FilesOnly(), Progress(10), *then)
    checkpoints.finish()
    with pytest.raises(CheckpointError) as caught:
        require_same_run(newest_whole(root, WORLD), *now, WORLD)
    assert f"data.path: {said}. Use another run_dir, or name the keys in resume.allow" in str(caught.value)


@pytest.mark.parametrize("steps", [10, 7])
def test_a_run_that_is_already_there_says_so(root, caplog, steps):
    """Otherwise it would end with no more than "done"."""
    save(root, 10)
    saved = newest_whole(root, WORLD)
    said = f"the run is already at step 10 of train.steps={steps}: nothing to do; raise train.steps to go on"
    short = {"optim": {"warmup_steps": 1}, "resume": {"allow": ["optim.warmup_steps"]}}
    with caplog.at_level(logging.INFO):
        require_same_run(saved, config(train={"steps": steps}, **short), DATA, WORLD)
        assert caplog.messages[1:] == [said]
        require_same_run(saved, config(train={"steps": 11}, **short), DATA, WORLD)
    assert caplog.messages[3:] == ["train.steps goes from 3000 to 11: the schedule follows the new number"]


def test_checkpoints_that_may_not_be_read_are_no_fresh_start(root):
    (root / "checkpoints").touch()  # as much of a folder as one without the right to list it
    with pytest.raises(CheckpointError, match="checkpoints cannot be read .Not a directory.; mend its rights, or start afresh in another"):
        newest_whole(root / "checkpoints", WORLD)


def test_more_steps_of_a_climb_are_named_as_that(root):
    """The samples of data.mqar_fewest depend on train.steps; where more than that differs, all of it is named."""
    save(root, 10)
    saved = newest_whole(root, WORLD)
    saved.state["data"] = {"mqar": {"pairs": 8, "climb": [4, 8], "rows each": 224}}
    longer = {"train": {"steps": 9000}, "data": {"path": None, "seq_len": 2048, "mqar_pairs": 8, "mqar_fewest": 4}}
    data = {"mqar": {"pairs": 8, "climb": [4, 8], "rows each": 480}}
    said = r"another run: data.path: train.steps: 3000 then, 9000 now, and with data.mqar_fewest=4 the samples depend on it\. "
    with pytest.raises(CheckpointError, match=said):
        require_same_run(saved, config(**longer), data, WORLD)
    require_same_run(saved, config(**longer, resume={"allow": ["data.path"]}), data, WORLD)
    with pytest.raises(CheckpointError, match="data.path: mqar .*'rows each': 224"):
        require_same_run(saved, config(**longer), {"mqar": {**data["mqar"], "climb": [2, 4, 8]}}, WORLD)
    with pytest.raises(CheckpointError, match="data.path: mqar .*'rows each': 224"):
        require_same_run(saved, config(data=longer["data"]), data, WORLD)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_tells_what_differs_and_of_the_conversion(root, monkeypatch, caplog, rank):
    """Onto two ranks at stage 2, with more steps and an optim.lr that may differ."""
    save(root, 10)
    saved = newest_whole(root, WORLD)
    now = config(train={"steps": 9000}, parallel={"zero": 2}, optim={"lr": 1e-3}, resume={"allow": ["optim.lr"]})
    world, put = World(rank, rank, 2, 1, torch.device("cpu")), []
    monkeypatch.setattr("pdn_train.engine.to_universal", lambda checkpoint, output: output.mkdir())
    engine = SimpleNamespace(put_universal=lambda folder, step: put.append((folder.name, step)), refresh_weights=lambda: None)
    with caplog.at_level(logging.INFO):
        require_same_run(saved, now, DATA, world)
        restore(saved, engine, now, world)
    assert put == [("step_0000000010.universal", 10)]
    lines = ["resume.allow: optim.lr: 0.0004 then, 0.001 now", "train.steps goes from 3000 to 9000", "step_0000000010 was written by"]
    assert len(caplog.messages) == (len(lines) if rank == 0 else 0)
    assert all(said.startswith(line) for said, line in zip(caplog.messages, lines, strict=False))


@pytest.mark.parametrize(
    "precision, then, before, now, road",
    [
        ("bf16", 2, False, 2, "direct"),
        ("bf16", 1, False, 2, "direct"),
        ("bf16", 2, False, 1, "direct"),
        ("bf16", 2, False, 3, "universal"),
        ("bf16", 1, True, 1, "direct"),
        ("bf16", 1, True, 2, "direct"),
        ("bf16", 2, True, 2, "universal"),  # of DeepSpeed's own optimizer
        ("bf16", 2, True, 1, "universal"),
        ("bf16", 3, True, 3, "direct"),
        ("fp32", 1, True, 2, "universal"),
        ("fp32", 2, True, 2, "direct"),
        ("fp32", 2, False, 2, "direct"),
    ],
)
def test_which_files_are_loaded_as_they_are(root, monkeypatch, precision, then, before, now, road):
    """before: the checkpoint is older than the word "flat" in state.json."""
    old, new = (config(train={"precision": precision}, parallel={"zero": stage}) for stage in (then, now))
    checkpoints, roads = Checkpoints(root, old.checkpoint, WORLD), []
    checkpoints.save(FilesOnly(), Progress(10), old, DATA)
    checkpoints.finish()
    saved = newest_whole(root, WORLD)
    if before:
        del saved.state["world"]["flat"]
    monkeypatch.setattr("pdn_train.engine.to_universal", lambda checkpoint, output: output.mkdir())
    engine = SimpleNamespace(
        load=lambda folder: roads.append("direct"),
        put_universal=lambda folder, step: roads.append("universal"),
        refresh_weights=lambda: None,
    )
    restore(saved, engine, new, WORLD)
    assert roads == [road]


def test_state_json_tells_what_was_saved(root):
    save(root, 10)
    state = json.loads((root / folder_name(10) / "state.json").read_text())
    assert state["progress"] == {"step": 10, "position": 40, "tokens": 640, "skipped_steps": 0, "skipped_in_row": 0}
    assert state["world"] == {"size": 1, "sequence": 1, "zero": 0, "flat": False}
    assert set(state["files"]) == {"part_0.pt", "part_1.pt", "rng_00000.pt"}


@pytest.mark.parametrize("there", [None, b"shor"])
def test_a_rank_whose_files_do_not_show_stops_the_save(root, monkeypatch, there):
    """A disk of a node's own: what rank 1 wrote is not what rank 0 would publish."""
    gather = World.gather

    def with_rank_1(world: World, value: object) -> list:
        """Rank 1 says that it has written a file of five bytes."""
        own = gather(world, value)
        files, fault = own[0]
        written = isinstance(files, dict) and "rng_00000.pt" in files
        return [*own, ({"rng_00001.pt": {"bytes": 5, "sha256": "0"}}, fault)] if written else own

    checkpoints = Checkpoints(root, config().checkpoint, WORLD)
    checkpoints.save(FilesOnly(), Progress(1), config(), DATA)
    if there:
        (root / "step_0000000001.tmp" / "rng_00001.pt").write_bytes(there)
    monkeypatch.setattr(World, "gather", with_rank_1)
    with pytest.raises(CheckpointError, match="does not see in .*, or not whole, .*: .'rng_00001.pt'.;"):
        checkpoints.finish()
    monkeypatch.undo()
    assert newest_whole(root, WORLD) is None
