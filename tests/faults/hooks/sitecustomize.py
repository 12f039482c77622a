"""Faults at chosen moments, inside the real program: Python imports this file when its folder is on PYTHONPATH, and it reads FAULT_PLAN.

FAULT_PLAN is JSON: {"folder": where marks are left, "faults": [{"rank", "at", "step", "act"}, ...]}. A fault happens once, over all starts
of the job, unless "again" is true; it leaves FOLDER/fault_N. at: what the rank says to its watchdog ("computing", "saving a checkpoint",
...), or "writing" (a checkpoint's first file is there, training goes on), or "completing" (between the rename of a checkpoint and its
COMPLETE), or "converted" (between DeepSpeed's conversion and the load). act: kill, raise, hold (until FOLDER/go appears), signal (until
this rank has had one), hang, stop (SIGSTOP), slow (0.5 s more in each forward pass from here on), nan (in one gradient of this step).
"""

import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from pathlib import Path

PLAN = json.loads(os.environ.get("FAULT_PLAN", '{"folder": "", "faults": []}'))
FOLDER = Path(PLAN["folder"])
SIGNALS: list[int] = []  # that this process was told of


def meet(at: str, step: int | None = None) -> None:
    for number, fault in enumerate(PLAN["faults"]):
        if fault["rank"] != int(os.environ.get("RANK", 0)) or fault["at"] != at or fault.get("step", step) != step:
            continue
        mark = FOLDER / f"fault_{number}"
        if mark.exists() and not fault.get("again"):
            continue
        mark.write_text(str(os.getpid()))
        ACTS[fault["act"]]()


def hold() -> None:
    while not (FOLDER / "go").exists():
        time.sleep(0.02)


def until_signalled() -> None:
    while not SIGNALS:
        time.sleep(0.02)


def fail() -> None:
    raise OSError(5, "a fault of the test")


def slow() -> None:
    from pdn_train.model import LanguageModel

    forward = LanguageModel.forward
    LanguageModel.forward = lambda *a, **k: (time.sleep(0.5), forward(*a, **k))[1]


def poison() -> None:
    from pdn_train.engine import Engine

    step = Engine.step

    def once(self, *arguments):
        hook = self.model.norm.register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0] * float("nan"), *grad_in[1:]))
        outcome = step(self, *arguments)
        hook.remove()
        Engine.step = step
        return outcome

    Engine.step = once


ACTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(10_000),
    "raise": fail,
    "hold": hold,
    "signal": until_signalled,
    "slow": slow,
    "nan": poison,
}


def watchdog(module) -> None:
    beat = module.Watchdog.beat

    def patched(self, doing, step=None):
        beat(self, doing, step)
        meet(doing, self._step)

    module.Watchdog.beat = patched


def publication(module) -> None:
    complete = module.complete

    def patched(folder, state):
        meet("completing", int(folder.name[5:]))
        complete(folder, state)

    module.complete = patched


def saving(module) -> None:
    sync = module.sync

    def patched(file):
        meet("writing", int(file.parent.name[5:15]))
        sync(file)

    module.sync = patched


def engine(module) -> None:
    convert = module.to_universal

    def patched(source, output):
        convert(source, output)
        meet("converted")

    module.to_universal = patched


def signals(module) -> None:
    note = module.StopRequest._note

    def patched(self, number, frame):
        SIGNALS.append(number)
        note(self, number, frame)

    module.StopRequest._note = patched


PATCHES = {
    "pdn_train.signals": signals,
    "pdn_train.watchdog": watchdog,
    "pdn_train.publication": publication,
    "pdn_train.saving": saving,
    "pdn_train.engine": engine,
}


class Finder(importlib.abc.MetaPathFinder):
    """Lets the others find a module, then patches it once it has run."""

    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            PATCHES[name](module)

        spec.loader.exec_module = exec_module
        return spec


if PLAN["faults"]:
    sys.meta_path.insert(0, Finder())
