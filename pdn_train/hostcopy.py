"""A copy of a rank's state in host memory, quick to take: page-locked, faulted in beforehand, kept for the next one.

Copies out of a GPU reach the bus's speed only into page-locked memory, and locking takes longer than copying: `HostCopy.reserve` does it
on a thread while the first steps run. The memory is locked in pieces, so that no launch waits long for the driver, and lies outside torch's
allocator, which rounds page-locked blocks up to powers of two.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, UntypedStorage, nn

log = logging.getLogger(__name__)
PIECE = 256 << 20  # bytes locked, and copied, at a time
ALIGNMENT = 4096


class HostCopy:
    """Memory for one copy at a time: taking the next one overwrites the last."""

    def __init__(self, device: torch.device):
        self._device = device
        self._threads = ThreadPoolExecutor(1, "host memory")
        self._memory: Future[_Memory] | None = None

    def reserve(self, state: object) -> None:
        """Begin to get memory for a copy of `state`, nested dictionaries, lists and tuples with tensors; returns at once."""
        self._get(room(state))

    def take(self, state: object) -> object:
        """`state` with its tensors copied to the host as they are now, those that share memory still sharing it; the rest is shared.

        Returns when the copy is there. Raises OSError where the memory cannot be had.
        """
        storages = _storages(state)
        self._get(sum(map(_room, storages.values())))
        memory = self._memory.result()
        hosts, start = {}, 0
        for key, storage in storages.items():
            hosts[key] = memory.copy(storage, start)
            start += _room(storage)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return _map(state, lambda tensor: _on_host(tensor, hosts))

    def close(self) -> None:
        """Give the memory back, for good; the copy taken last must no longer be used."""
        self._give_back()
        self._threads.shutdown()

    def _give_back(self) -> None:
        if self._memory is not None and self._memory.exception() is None:
            self._memory.result().unlock()
        self._memory = None

    def _get(self, size: int) -> None:
        if self._memory is not None and self._memory.result().size < size:
            self._give_back()
        if self._memory is None:
            self._memory = self._threads.submit(_Memory, size, self._device)


class _Memory:
    """`size` bytes, page-locked where the device is a GPU and allows it."""

    def __init__(self, size: int, device: torch.device):
        self.size, self._locked = size, []
        if not size:
            return
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages: the same memory, slower to lock
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        lock = device.type == "cuda"
        for piece in self._bytes.split(PIECE):
            piece.zero_()
            lock = lock and self._lock(piece, device)

    def _lock(self, piece: Tensor, device: torch.device) -> bool:
        """Whether it could be; else copies go the driver's slower way, to the same end."""
        with torch.cuda.device(device):  # on a new thread it would be the first one, and get a context there
            code = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
        if code:
            log.warning("host memory for checkpoints is not page-locked (cudaHostRegister: error %d): saves stop training longer", code)
            return False
        self._locked.append(piece)
        return True

    def copy(self, storage: UntypedStorage, start: int) -> UntypedStorage:
        """Begin to copy a storage to `start`, in pieces that were locked together; returns the copy's storage."""
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        done = 0
        while done < storage.nbytes():
            count = min(PIECE - (start + done) % PIECE, storage.nbytes() - done)
            target = self._bytes[start + done : start + done + count]
            target.copy_(source[done : done + count], non_blocking=True)
            done += count
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=done).untyped_storage()

    def unlock(self) -> None:
        for piece in self._locked:  # after a fault of the GPU this fails too; the fault itself is told elsewhere
            torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())
        self._locked = []


def room(state: object) -> int:
    """Bytes of memory for a copy of `state`."""
    return sum(map(_room, _storages(state).values()))


def _room(storage: UntypedStorage) -> int:
    return -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT


def _storages(state: object) -> dict[int, UntypedStorage]:
    """Every storage that is not empty, once, in order, by what torch.save too knows it by."""
    found: dict[int, UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, storage)
        return tensor

    _map(state, note)
    return found


def _on_host(tensor: Tensor, hosts: dict[int, UntypedStorage]) -> Tensor:
    storage = hosts.get(tensor.untyped_storage()._cdata, UntypedStorage(0))
    host = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return nn.Parameter(host, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else host.requires_grad_(tensor.requires_grad)


def _map(value: object, act: Callable[[Tensor], Tensor]) -> object:
    """`value` with act(tensor) for each tensor in its dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # of the same kind, with its own attributes, such as a module's _metadata
        for key, item in value.items():
            mapped[key] = _map(item, act)
        return mapped
    if type(value) in (list, tuple):  # other kinds, such as torch.Size, hold no tensors
        return type(value)(_map(item, act) for item in value)
    return value
