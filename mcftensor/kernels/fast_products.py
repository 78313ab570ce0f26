"""Products of 16-bit matrices on a CPU without instructions for them."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")  # with a form `out=`, which compiled models call
_OTHERS = (
    *("convolution", "convolution_backward"),
    "_scaled_dot_product_flash_attention_for_cpu_backward",  # forward is fast
)
_SLOWER = 3  # times as slow as float32; without instructions a product is 7 to 30 times as slow


class fast_products(contextlib.ContextDecorator):
    """Context, also a decorator, in which a CPU multiplies 16-bit matrices at the speed of float32.

    Many CPUs, such as those with AVX2 alone, have no instructions for products of bf16 or float16.
    There PyTorch takes 7 to 30 times as long as in float32. Within the context, matrix products,
    convolutions and gradients of attention of such a dtype are computed in float32 and rounded once
    to the dtype, as on CPUs with these instructions and on GPUs. Products of other dtypes and on
    other devices do not change.

    The context holds for forward, backward, steps and compiled models, in all threads of the
    process. Contexts can be nested. Enter and leave them while no other thread computes.

    *Error*: that of a float32 product, and one rounding to the dtype of the operands.

    *Cost*: 10 µs a product, and float32 copies of its operands. A float32 product takes 2 µs more.

    Examples:
        >>> import torch, mcftensor as mcf
        >>> model = mcf.as_expansion(torch.nn.Linear(2, 1))
        >>> with mcf.fast_products():
        ...     model(torch.ones(3, 2, dtype=torch.bfloat16)).sum().backward()
        >>> model.weight.grad
        tensor([[3., 3.]], dtype=torch.bfloat16)
    """

    def __enter__(self) -> fast_products:
        with _CONTEXTS.lock:
            if _CONTEXTS.depth == 0 and (slow := slow_dtypes()):
                _CONTEXTS.library = _override(slow)
            _CONTEXTS.depth += 1
        return self

    def __exit__(self, *args: Any) -> None:
        with _CONTEXTS.lock:
            _CONTEXTS.depth -= 1
            if _CONTEXTS.depth == 0 and _CONTEXTS.library is not None:
                _CONTEXTS.library._destroy()
                _CONTEXTS.library = None


class _Contexts:
    """The contexts of the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.library: Library | None = None


_CONTEXTS = _Contexts()


@functools.cache
def slow_dtypes() -> frozenset[torch.dtype]:
    """Return the 16-bit dtypes whose products are slow on this CPU.

    PyTorch says that it has no instructions for them, and a product takes more than three times as
    long as in float32.
    """
    return frozenset(
        dtype
        for dtype in _NAMES
        if not _has_instructions(dtype) and _seconds(dtype) > _SLOWER * _seconds(torch.float32)
    )


def _has_instructions(dtype: torch.dtype) -> bool:
    # A PyTorch without oneDNN, as on macOS, does not have the question.
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{_NAMES[dtype]}_supported")())


def _seconds(dtype: torch.dtype) -> float:
    """Return the time of one product, the best of several."""
    x = torch.ones(128, 128, dtype=dtype, device="cpu")
    times = []
    for _ in range(6):
        start = time.perf_counter()
        torch.mm(x, x)
        times.append(time.perf_counter() - start)
    return min(times)


def _override(slow: frozenset[torch.dtype]) -> Library:
    """Return a library of kernels that compute products of slow dtypes in float32."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in (*_PRODUCTS, *_OTHERS):
            kernel = get_kernel(f"aten::{name}", "CPU")
            library.impl(name, _in_float32(kernel, slow), "CPU", with_keyset=True)
        for name in _PRODUCTS:
            product = getattr(torch.ops.aten, name).default
            into = _into(product, get_kernel(f"aten::{name}.out", "CPU"), slow)
            library.impl(f"{name}.out", into, "CPU", with_keyset=True)
    return library


def _in_float32(kernel: Any, slow: frozenset[torch.dtype]) -> Callable[..., Any]:
    def product(keys: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = args[0].dtype
        if dtype not in slow:
            return kernel.call_boxed(keys, *args, **kwargs)
        args = tuple(x.float() if isinstance(x, Tensor) else x for x in args)
        found = kernel.call_boxed(keys, *args, **kwargs)
        if isinstance(found, Tensor):
            return found.to(dtype)
        return tuple(None if x is None else x.to(dtype) for x in found)

    return product


def _into(product: Any, kernel: Any, slow: frozenset[torch.dtype]) -> Callable[..., Tensor]:
    def store(keys: Any, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        if out.dtype not in slow:
            return kernel.call_boxed(keys, *args, out=out, **kwargs)
        found = product(*args, **kwargs)
        return out.resize_(found.shape).copy_(found)

    return store
