"""Going on from a checkpoint: which one, whether it fits the run, and its state put back.

Rank 0 walks from the newest step down and the ranks check the files between them; a damaged checkpoint is passed over with a warning that
names the fault. On another world size, or a ZeRO stage with other files, the ZeRO files are first turned into DeepSpeed's universal form,
whole or not at all, which takes the room of one more checkpoint while it is loaded.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from pdn_train.checkpoint import CheckpointError, Saved, damage, folders, read_state
from pdn_train.config import Config, default
from pdn_train.publication import finish_publications
from pdn_train.rng import restore_rng, rng_file
from pdn_train.telling import counted
from pdn_train.world import World

SHAPES = tuple(
    f"model.{key}" for key in ("recurrence", "hidden_size", "num_layers", "num_heads", "head_dim", "intermediate_size", "vocab_size")
)
log = logging.getLogger(__name__)


def newest_whole(root: Path, world: World) -> Saved | None:
    """The newest whole checkpoint below a run's checkpoints folder; None where none was ever published. Collective.

    Raises CheckpointError where some were published and none is whole, and where the folder cannot be read.
    """
    world.from_leader(lambda: _prepare(root))
    faults = []
    for folder in world.from_leader(lambda: folders(root)):
        state, fault = _read_together(folder, world)
        if fault is None:
            return Saved(folder, state)
        faults.append(fault)
        if world.leads:
            log.warning("passed over the checkpoint %s: %s", folder.name, fault)
    if faults:
        raise CheckpointError(
            f"no checkpoint in {root} is whole ({'; '.join(faults)}); restore one from a copy, or start afresh in another run_dir"
        )
    return None


def _prepare(root: Path) -> None:
    try:
        os.listdir(root)  # a glob finds nothing in a folder that it may not read
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read ({error.strerror}); mend its rights, or start afresh in another run_dir") from error
    finish_publications(root)


def _read_together(folder: Path, world: World) -> tuple[dict | None, str | None]:
    """(state.json, None), or (None, what is wrong); each rank reads its share of the files."""
    state, fault = world.from_leader(lambda: read_state(folder))
    if fault is not None:
        return None, fault
    share = dict(sorted(state["files"].items())[world.rank :: world.size])
    faults = [fault for fault in world.together(lambda: damage(folder, share)) if fault is not None]
    return (None, faults[0]) if faults else (state, None)


def require_same_run(saved: Saved, config: Config, data: dict, world: World) -> None:
    """Raise CheckpointError naming every key in which a checkpoint and the run that would resume from it disagree.

    Compared are the model (whatever computes it), the data and their order, the optimizer and its schedule, batch, seed and precision, less
    `resume.allow`; train.steps may always grow or shrink, with the schedule following the new number. data: the samples' fingerprint.
    Rank 0 logs what differs and may.
    """
    then, now = saved.state["config"], config.model_dump(mode="json")
    keys = [f"{section}.{key}" for section in ("model", "optim") for key in now[section] if f"{section}.{key}" != "model.kernel"]
    keys += ["data.seq_len", "data.seed", "data.reset_at_documents", "train.global_batch", "train.seed", "train.precision"]
    differing = [f"{key}: {_get(then, key)!r} then, {_get(now, key)!r} now" for key in keys if _get(then, key) != _get(now, key)]
    if saved.state["data"] != data:
        climb = _climb_difference(saved.state, now, data)
        differing.append(f"data.path: {climb or _data_difference(saved.state['data'], data, _get(then, 'data.path'), now['data']['path'])}")
    allowed = [key for key in config.resume.allow if key not in SHAPES]
    refused = [text for text in differing if text.partition(":")[0] not in allowed]
    if refused:
        raise CheckpointError(
            f"{saved.folder} is of another run: "
            + "; ".join(refused)
            + ". Use another run_dir, or name the keys in resume.allow if this is meant (those of the model's shape cannot be allowed)"
        )
    if not world.leads:
        return
    for text in differing:
        log.warning("resume.allow: %s", text)
    step, before, after = saved.progress.step, _get(then, "train.steps"), config.train.steps
    if step >= after:
        log.info("the run is already at step %d of train.steps=%d: nothing to do; raise train.steps to go on", step, after)
    elif before != after:
        log.info("train.steps goes from %s to %s: the schedule follows the new number", before, after)


def restore(saved: Saved, engine, config: Config, world: World) -> None:
    """Load weights, masters and moments into a pdn_train.engine.Engine, and the random state. Collective.

    On the same world size, ZeRO stage and precision every bit is that of the save, as between stages 1 and 2 in bf16 (`Config.flat_zero`);
    otherwise the state comes through the universal form, without the random state. Raises what DeepSpeed raises.
    """
    here = {"size": world.size, "sequence": world.sequence, "zero": config.parallel.zero, "flat": config.flat_zero}
    then, there = saved.state["config"], saved.state["world"]
    precision = _get(then, "train.precision")
    # Before state.json said "flat", stage 2 in bf16 was DeepSpeed's own optimizer, whose files are laid out by other rules
    flat = there.get("flat", there["zero"] == 1 and precision == "bf16")
    same_layout = there["size"] == here["size"] and flat == here["flat"] and (flat or there["zero"] == here["zero"])
    same_groups = _get(then, "optim.decay_all") == config.optim.decay_all  # which parameters lie side by side
    if same_layout and same_groups and precision == config.train.precision:
        engine.load(saved.folder)
        restore_rng(rng_file(saved.folder, world.rank))
        return
    from pdn_train.engine import to_universal  # here, so that finding a checkpoint needs no DeepSpeed

    if world.leads:
        before, now = _layout(there, flat), _layout(here, here["flat"])
        groups = "" if same_groups else ", with other groups of parameters"
        log.info("%s was written by %s; loading it as %s%s, through the universal form", saved.folder.name, before, now, groups)
    universal = saved.folder.with_name(saved.folder.name + ".universal")
    world.from_leader(lambda: to_universal(saved.folder, universal))
    progress = saved.progress
    world.together(lambda: engine.put_universal(universal, progress.step - progress.skipped_steps))
    engine.refresh_weights()
    world.from_leader(lambda: shutil.rmtree(universal))


def _layout(world: dict, flat: bool) -> str:
    """Who wrote or reads ZeRO files, in words."""
    optimizer = " (the optimizer of pdn_train/flat_zero.py)" if flat else ""
    return f"{counted(world['size'], 'rank')}, {world.get('sequence', 1)} a sequence, at ZeRO-{world['zero']}{optimizer}"


def _get(tree: dict, key: str) -> object:
    """Of a configuration; a key that there was not yet then did what its default does."""
    section, _, name = key.partition(".")
    return tree[section].get(name, default(key))


DataPath = str | dict[str, float] | None  # data.path


def _data_difference(then: dict, now: dict, path_then: DataPath, path_now: DataPath) -> str:
    """Of two fingerprints of samples, whose folders are named as data.path names them."""
    differing = []
    for key in (key for key in sorted({*then, *now}) if then.get(key) != now.get(key)):
        if key == "folders":
            differing.append(_mixture_difference(then.get(key, []), now.get(key, []), _names(path_then), _names(path_now)))
        else:
            differing.append(f"{key} {then.get(key)!r} then, {now.get(key)!r} now")
    return ", ".join(differing)


def _names(path: DataPath) -> list[str]:
    return list(path) if isinstance(path, dict) else [] if path is None else [path]


def _mixture_difference(then: list[dict], now: list[dict], names_then: list[str], names_now: list[str]) -> str:
    """What has changed folder by folder; all of both where some came, went or changed places, on which the order of samples depends too."""
    manifests_then, manifests_now = ([folder["manifest"] for folder in folders] for folders in (then, now))
    moved = manifests_then != manifests_now and sorted(manifests_then) == sorted(manifests_now)
    if len(then) != len(now) or moved:
        return f"{_listed(names_then, then)} then, {_listed(names_now, now)} now"
    return ", ".join(_folder_difference(*one) for one in zip(names_now, then, now, strict=True) if one[1] != one[2])


def _listed(names: list[str], folders: list[dict]) -> str:
    weighed = [f"{name} (weight {folder['weight']})" for name, folder in zip(names, folders, strict=True)]
    return " + ".join(weighed) or "no folder"


def _folder_difference(name: str, then: dict, now: dict) -> str:
    """Without the manifests' checksums, which tell nobody anything."""
    differing = []
    if then["manifest"] != now["manifest"]:
        differing.append(f"other shards ({then['tokens']:,} tokens then, {now['tokens']:,} now)")
    if then["weight"] != now["weight"]:
        differing.append(f"weight {then['weight']} then, {now['weight']} now")
    return f"{name} has " + " and ".join(differing)


def _climb_difference(state: dict, now: dict, data: dict) -> str | None:
    """Where nothing but train.steps has changed the samples of `pdn_train.mqar`: the keys by which it does; otherwise None."""
    then, climb = state["data"].get("mqar", {}), data.get("mqar", {})
    before, after = _get(state["config"], "train.steps"), now["train"]["steps"]
    if before == after or {key for key in {*then, *climb} if then.get(key) != climb.get(key)} != {"rows each"}:
        return None
    return f"train.steps: {before} then, {after} now, and with data.mqar_fewest={now['data']['mqar_fewest']} the samples depend on it"
