"""Activation checkpointing: a module keeps less of its forward pass and runs parts of it again in the backward pass.

    none        everything the backward pass needs is kept
    block       the module keeps its input and is run again, whole
    selective   it keeps its input and the products of its Linear layers; all else is run again: norms, convolution, gates, activation
                functions, and with model.kernel=torch the recurrence, whose own products are batched ones. What the Triton recurrence
                makes for its backward pass is kept too (`kernels.kept`): 0.8 KB a token and head (16 bits, 128 channels, a decay a head),
                and its stages are most of what would be run again. q, k, v and the gates, which it reads, are made again by one launch

The gradients are the same bit for bit, also under ZeRO-3. What each mode keeps, in bytes: `pdn_train.estimate`.
"""

from __future__ import annotations

from torch import Tensor, nn, ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kernels import kept as kernel_results

_PRODUCT = ops.aten.mm.default  # what a Linear runs, and `kernels.swiglu.swiglu_linear`


def _plainly(module: nn.Module, *inputs: object) -> Tensor:
    return module(*inputs)


def _again(module: nn.Module, *inputs: object) -> Tensor:
    return checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing here draws random numbers


def _between_products(module: nn.Module, *inputs: object) -> Tensor:
    return checkpoint(module, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=_keep_products)


RUN = {"none": _plainly, "block": _again, "selective": _between_products}  # mode -> f(module, *inputs) = module(*inputs)


def _keep_products() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What `checkpoint` enters in the forward pass and when it runs a module again: the first keeps each product, the second hands it back.

    torch's own create_selective_checkpoint_contexts counts every operator and stops at one that the forward pass did not run. ZeRO-3
    gathers and frees parameters at other moments when a module runs again, so only the products may be counted.
    """
    kept: list[Tensor] = []
    results: list[kernel_results.Results] = []
    return _Keep(kept, results), _HandBack(kept, results)


class _Mode(TorchDispatchMode):
    """A dispatch mode for operators, and beside it what holds the results of kernels."""

    def __init__(self, kept: list[Tensor], holder: kernel_results.Keep):
        super().__init__()
        self.kept, self.holder = kept, holder

    def __enter__(self):
        self.holder.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.holder.__exit__(*error)


class _Keep(_Mode):
    def __init__(self, kept: list[Tensor], results: list[kernel_results.Results]):
        super().__init__(kept, kernel_results.Keep(results))
        self.places = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        changed = args[0] if op._schema.is_mutable and args else None
        if isinstance(changed, Tensor) and _place(changed) in self.places:
            raise RuntimeError(f"{op} changes in place a product {list(changed.shape)} that selective checkpointing keeps")
        out = op(*args, **(kwargs or {}))
        if op is _PRODUCT:
            self.kept.append(out.detach())
            self.places.add(_place(out))
        return out


class _HandBack(_Mode):
    def __init__(self, kept: list[Tensor], results: list[kernel_results.Results]):
        super().__init__(kept, kernel_results.HandBack(results))

    def __enter__(self):
        self.next = iter(self.kept)
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return next(self.next).detach() if op is _PRODUCT else op(*args, **(kwargs or {}))


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
