"""TensorBoard's event files of a run: one for each start, whole records, nothing later than the step a run resumes from.

torch's SummaryWriter writes from a thread that a full disk ends for good, and leaves a part of a record, at which every reader stops.
"""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from pdn_train.files import Growing

NAME = "events.out.tfevents."


class Board:
    """The event file of one start; it appears with its first record."""

    def __init__(self, folder: Path):
        self._file = Growing(folder / f"{NAME}{time.time():.6f}.{socket.gethostname()}.{os.getpid()}")
        self._begun = False

    def add(self, step: int, values: list[Summary.Value]) -> None:
        """Write values of one step, all or none. Raises OSError."""
        events = [Event(wall_time=time.time(), step=step, summary=Summary(value=values))]
        if not self._begun:
            events.insert(0, Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._file.append(_records([event.SerializeToString() for event in events]))
        self._begun = True


def scalar(tag: str, value: float) -> Summary.Value:
    return Summary.Value(tag=tag, simple_value=value)


def bars(tag: str, counts: list[float], ends: tuple[float, float]) -> Summary.Value:
    """A histogram that is counted already, bars of equal width; its sums are those of the bars' middles."""
    low, width = ends[0], (ends[1] - ends[0]) / len(counts)
    middles = [low + (i + 0.5) * width for i in range(len(counts))]
    first, second = (sum(c * m**power for c, m in zip(counts, middles, strict=True)) for power in (1, 2))
    limits = [low + (i + 1) * width for i in range(len(counts))]
    sums = {"num": sum(counts), "sum": first, "sum_squares": second}
    return Summary.Value(tag=tag, histo=HistogramProto(min=ends[0], max=ends[1], bucket_limit=limits, bucket=counts, **sums))


def cut_events(folder: Path, step: int) -> None:
    """Rewrite the event files without the events past `step`; a record that is not whole ends a file, as for TensorBoard itself."""
    for file in (found for found in folder.glob(NAME + "*") if found.is_file()):
        kept = [raw for raw in RawEventFileLoader(str(file)).Load() if not _is_later(raw, step)]
        aside = file.with_name(f".{file.name}.cut")
        aside.write_bytes(_records(kept))
        aside.replace(file)


def _is_later(raw: bytes, step: int) -> bool:
    event = Event.FromString(raw)
    return event.HasField("summary") and event.step > step


def _records(events: list[bytes]) -> bytes:
    made = io.BytesIO()
    writer = RecordWriter(made)
    for event in events:
        writer.write(event)
    return made.getvalue()
