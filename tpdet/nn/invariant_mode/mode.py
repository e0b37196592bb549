"""`tpdet.nn.invariant()`: while inside, a PyTorch model has the same bits alone and in a batch.

PyTorch's usual way to replace an operator, `torch.library.Library("aten", "IMPL")`, replaces it for
all threads of a process, and until somebody undoes it. Here each replacement is an operator of
`torch.library` of its own (`tpdet_invariant::mm` beside `aten::mm`, with its schema). Two modes,
which belong to a thread and end when the `with` does, send calls there:

- a `TorchDispatchMode` sees every operator below autograd, forward and backward, and knows what it
  is (`admitted.py`): admitted as it is, run in whole vectors, replaced, or refused by its name;
- a `TorchFunctionMode` sees `scaled_dot_product_attention` before PyTorch decomposes it, by device,
  dtype and mask, into one of five kernels.

Autograd takes a thread's modes along into the threads of its backward pass. Call `backward()`
inside: outside, the gradients of products, norms and the like are PyTorch's own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from tpdet.errors import UsageError
from tpdet.nn.invariant_mode.admitted import ADMITTED
from tpdet.nn.invariant_mode.attention import attention
from tpdet.nn.invariant_mode.pointwise import in_whole_vectors

_SPACE = "tpdet_invariant"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_library = torch.library.Library(_SPACE, "FRAGMENT")


@contextmanager
def invariant() -> Iterator[None]:
    """Run PyTorch code in this thread with operators whose rows do not depend on the batch.

    Raises UsageError, in the call that meets it, for an operator outside the committed lists, with
    its name, and for float64. Nested uses are one. This thread has one thread for an operator
    meanwhile, others keep theirs.
    """
    if any(isinstance(mode, InvariantOperators) for mode in _get_current_dispatch_mode_stack()):
        yield
        return
    with ExitStack() as stack:
        threads = torch.get_num_threads()
        stack.callback(_use_threads, threads, threads)
        _use_threads(1, threads)
        stack.enter_context(InvariantOperators())
        stack.enter_context(InvariantAttention())
        yield


class InvariantOperators(TorchDispatchMode):
    """Sends every operator below autograd to what `admitted.py` has for it, or refuses it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: a guard against torch.compile in each call would import that, for seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The operator's result. Raises UsageError."""
        named = kwargs or {}
        route = _routes().get(func)
        if route is not None:
            return route(func, *args, **named)
        if func.namespace in (_SPACE, "tpdet", "profiler"):
            return func(*args, **named)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:  # inference mode shows operators before their decomposition
                return func.decompose(*args, **named)
        raise _refusal(func)


class InvariantAttention(TorchFunctionMode):
    """Takes `scaled_dot_product_attention` over, whichever kernel PyTorch would choose for it."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The function's result."""
        chosen = attention if func is scaled_dot_product_attention else func
        return chosen(*args, **(kwargs or {}))


_COMPOSITE = "CompositeImplicitAutograd"


@cache
def _routes() -> dict[OpOverload, Any]:
    """What is called for each operator, with the operator and its arguments."""
    routes: dict[OpOverload, Any] = {}
    for names, route in (
        (ADMITTED.copies, _as_it_is),
        (ADMITTED.order_free, _as_it_is),
        (ADMITTED.exact, _unscaled),
        (ADMITTED.whole_numbers, _of_whole_numbers),
        (ADMITTED.elementwise, _elementwise),
    ):
        routes |= dict.fromkeys(filter(None, map(overload, names)), route)
    for name, target in ADMITTED.replaced.items():
        func = overload(name)
        if func is not None:
            routes[func] = partial(_replaced, _register(func, target))
    return routes


def overload(name: str) -> OpOverload | None:
    """The operator of `aten` with such a name as `sum.dim_IntList`; None of another PyTorch."""
    packet, _, variant = name.partition(".")
    operators = getattr(torch.ops.aten, packet, None)
    return getattr(operators, variant or "default", None)


def _register(func: OpOverload, target: str) -> OpOverload:
    """The operator `tpdet_invariant::name`, with aten's schema, made of a function of this room.

    One that writes to its first argument is made of the function that gives a new tensor.
    """
    module, _, function = target.partition(".")
    schema = str(func._schema).removeprefix("aten::")
    name = schema.partition("(")[0]
    _library.define(schema)
    body = getattr(import_module(f"tpdet.nn.invariant_mode.{module}"), function)
    if func._schema.is_mutable:
        body = partial(_written_back, body)
    _library.impl(name, body, "CompositeExplicitAutograd")
    packet, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.tpdet_invariant, packet), variant or "default")


def _written_back(body: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
    return x.copy_(body(x, *args, **named))


def _as_it_is(func: OpOverload, *args: Any, **named: Any) -> Any:
    return func(*args, **named)


def _unscaled(func: OpOverload, *args: Any, **named: Any) -> Any:
    if named.get("alpha", 1) != 1:
        raise UsageError(f"{func} with alpha {named['alpha']}: multiply before you add")
    return func(*args, **named)


def _of_whole_numbers(func: OpOverload, *args: Any, **named: Any) -> Any:
    if any(isinstance(x, Tensor) and x.is_floating_point() for x in args):
        raise UsageError(f"{func} of floating values is not in the list of tpdet.nn.invariant()")
    return func(*args, **named)


def _elementwise(func: OpOverload, *args: Any, **named: Any) -> Any:
    _check_types(func, args)
    tensors = [x for x in args if isinstance(x, Tensor)]
    rest = args[len(tensors) :]
    return in_whole_vectors(lambda *flat: func(*flat, *rest, **named), *tensors)


def _replaced(replacement: OpOverload, func: OpOverload, *args: Any, **named: Any) -> Any:
    _check_types(func, args)
    return replacement(*args, **named)


def _check_types(func: OpOverload, args: tuple[Any, ...]) -> None:
    for x in args:
        if not isinstance(x, Tensor) or x.dtype in _TYPES:
            continue
        if x.is_floating_point() or x.is_complex():
            raise UsageError(f"{func} of {x.dtype}: use float32, bfloat16 or float16")


def _refusal(func: OpOverload) -> UsageError:
    short = str(func).removeprefix("aten.").removesuffix(".default")
    remedy = ADMITTED.remedies.get(short, "call it outside of the `with`")
    return UsageError(f"{func} is no operator that tpdet.nn.invariant() admits: {remedy}")


def _use_threads(own: int, others: int) -> None:
    """Have `own` threads for an operator of this thread; a new thread begins with `others`.

    PyTorch sets both at once, the second for all threads to come; so a thread that ends at once
    sets it again.
    """
    torch.set_num_threads(own)
    if own != others:
        helper = Thread(target=torch.set_num_threads, args=(others,))
        helper.start()
        helper.join()
