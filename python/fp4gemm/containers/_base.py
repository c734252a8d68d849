"""Container, the base class of all operands: attributes of a weight, copies, moves, pickles, pytree."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast, overload

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from .. import _checks

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Container"]


class Container:
    """A quantized matrix or stack of matrices: a few tensors, and the numbers that define their meaning.

    A container is not a torch.Tensor; bench/NOTES.md, in Host time, says why. It answers what model code asks
    of ``module.weight`` without computing anything: ``dtype``, ``shape``, ``size()``, ``numel()``,
    ``device``, ``to()`` and the like. Arithmetic on it raises TypeError. A subclass is a frozen dataclass
    that lists its fields in the three class variables.

    Every subclass declares ``dtype`` as its last field, keyword-only: torch.float32, torch.bfloat16 or
    torch.float16, the dtype of the plain tensor that the container represents, and the default of
    ``dequantize``. No stored byte depends on it. This class is not a dataclass, because an inherited field
    comes first in dataclasses.fields, and torch.compile (2.11) binds positional arguments in that order.
    """

    _tensors: ClassVar[tuple[str, ...]]  # fields that are always tensors; the first holds the elements
    _optional: ClassVar[tuple[str, ...]] = ()  # fields that are a tensor or None
    _constants: ClassVar[tuple[str, ...]] = ("dtype",)  # all other fields

    # The int64 tensor of which ``offs`` is a copy, and its version then: :meth:`_made_of`. Copies omit it.
    _given_offs: ClassVar[tuple[Tensor, int | None] | None] = None

    dtype: torch.dtype

    def __post_init__(self) -> None:
        _checks.is_float_dtype("dtype", self.dtype)

    def _check_values(self) -> None:
        """Raise ValueError unless the values of the tensors are allowed. Synchronises on a GPU."""

    @classmethod
    def _assembled(cls, fields: dict[str, Any]) -> Self:
        """An object of these fields, unchecked: pytree leaves may be anything, even None."""
        made = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    def _parts(self) -> dict[str, Any]:
        """Every field that is a tensor, by name."""
        optional = {name: getattr(self, name) for name in self._optional}
        return {name: getattr(self, name) for name in self._tensors} | {
            name: value for name, value in optional.items() if value is not None
        }

    def _mapped(self, fn: Callable[[Tensor], Tensor], **changed: Any) -> Self:
        """A container with ``fn`` applied to each tensor, and with the values ``changed`` of fields."""
        fields = {name: getattr(self, name) for name in (*self._constants, *self._optional)}
        return self._assembled(fields | {name: fn(part) for name, part in self._parts().items()} | changed)

    def _stamped(self, dtype: torch.dtype) -> Self:
        """Set the dtype of a container that was just made, and return it."""
        if dtype is not torch.float32:  # the class attribute
            object.__setattr__(self, "dtype", dtype)
        return self

    def _made_of(self, given: Tensor | None) -> Self:
        """Remember the tensor that the caller passed as offs where the container holds a copy in int32.

        That the groups of two operands are the same can then be told from the tensors, without their values.
        """
        if given is not None and given is not cast(Any, self).offs:
            object.__setattr__(self, "_given_offs", with_version(given))
        return self

    @property
    def _elements(self) -> Tensor:
        elements: Tensor = getattr(self, self._tensors[0])
        return elements

    @property
    def _size(self) -> torch.Size:
        """``shape``, which is a field of one subclass and a property of the others."""
        size: torch.Size = cast(Any, self).shape
        return size

    @property
    def device(self) -> torch.device:
        return self._elements.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(part.nbytes for part in self._parts().values())

    @property
    def ndim(self) -> int:
        """2, or 3 of a stack."""
        return len(self._size)

    def dim(self) -> int:
        """2, or 3 of a stack."""
        return len(self._size)

    @overload
    def size(self, dim: None = None) -> torch.Size: ...

    @overload
    def size(self, dim: int) -> int: ...

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or one entry of it.

        Raises:
            TypeError: dim is not an int. IndexError: it is out of range.
        """
        if dim is None:
            return self._size
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim: got {_checks.describe(dim)}, must be an int or None")
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(f"dim: got {dim}, must be at least {-self.ndim} and below {self.ndim}")
        return self._size[dim]

    def numel(self) -> int:
        """Elements of the matrices; not bytes, and without padding."""
        return math.prod(self._size)

    @property
    def is_meta(self) -> bool:
        return self._elements.is_meta

    @property
    def is_cuda(self) -> bool:
        return self._elements.is_cuda

    @property
    def requires_grad(self) -> bool:
        """False: no gradient flows to a quantized operand."""
        return False

    def requires_grad_(self, requires_grad: bool = False) -> Self:
        """The container itself.

        Raises:
            TypeError: requires_grad is not a bool. NotImplementedError: it is True.
        """
        _checks.is_bool("requires_grad", requires_grad)
        if requires_grad:
            raise NotImplementedError("requires_grad: got True, must be False for a quantized operand")
        return self

    def is_floating_point(self) -> bool:
        """True: the elements represent floating-point numbers."""
        return True

    def detach(self) -> Self:
        """The container itself, since it has no gradient."""
        return self

    def clone(self) -> Self:
        """A copy that shares no memory."""
        return self._mapped(lambda part: part.clone())

    def cpu(self) -> Self:
        """``to("cpu")``."""
        return self.to("cpu")

    def cuda(self) -> Self:
        """``to("cuda")``, the current CUDA device."""
        return self.to("cuda")

    def to(
        self,
        device: torch.device | str | int | torch.dtype | Tensor | Container | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> Self:
        """Return the container on another device or for another dtype, or the container itself.

        The stored bytes are the same. The arguments are those of torch.Tensor.to. It synchronises where
        torch.Tensor.to does.

        Args:
            device: a torch.device, its name or a CUDA index; None keeps the device. A torch.dtype in its
                place is ``dtype``; a tensor or a container gives both. ``dtype`` must then be None.
            dtype: what ``dtype`` of the result is; it does not change the values.
            non_blocking: as for torch.Tensor.to.
            copy: True copies even where nothing differs.

        Raises:
            TypeError: an argument of another type, or two dtypes. ValueError: torch has no such device.
        """
        if dtype is not None and isinstance(device, (torch.dtype, Tensor, Container)):
            raise TypeError(f"dtype: got {_checks.describe(dtype)}, must be None after a dtype or a tensor")
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        elif isinstance(device, (Tensor, Container)):
            like = device
            device, dtype = like.device, like.dtype
        if dtype is not None:
            _checks.is_float_dtype("dtype", dtype)
        _checks.is_bool("non_blocking", non_blocking)
        _checks.is_bool("copy", copy)
        target = self.device if device is None else _checks.as_device("device", device)
        moved = _checks.moved("device", self._elements, target)
        wanted = self.dtype if dtype is None else dtype
        if moved is self._elements and wanted is self.dtype and not copy:
            return self
        return self._mapped(lambda part: part.to(target, non_blocking=non_blocking, copy=copy), dtype=wanted)

    def _refuse(self, what: str) -> NoReturn:
        values = "dequantize() gives the values, " if hasattr(self, "dequantize") else ""
        raise TypeError(
            f"{what}: does not accept an fp4gemm.{type(self).__name__}, must get a torch.Tensor; {values}"
            "fp4gemm.mm multiplies. Where a model reads the weight of a layer by itself, "
            "quantize_model(exclude=...) leaves that layer as it is"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Raise TypeError for a torch function of a container, and say what to do."""
        found = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Container)]
        name = getattr(function, "__name__", str(function))
        (found[0] if found else object.__new__(cls))._refuse(name)

    def __matmul__(self, other: object) -> NoReturn:
        self._refuse("@")

    def __rmatmul__(self, other: object) -> NoReturn:
        self._refuse("@")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        self._refuse("numpy.asarray")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = copied = self._mapped(lambda part: copy.deepcopy(part, memo))
        return copied

    def _options(self) -> list[str]:
        """The text that ``repr`` shows between the shape and the device: amax, bound, groups, rotation."""
        t = cast(Any, self)
        shown = [f"amax={tuple(t.amax.shape)}", f"e4m3_max={t.e4m3_max}"]
        offs = getattr(t, "offs", None)
        if offs is not None:
            shown.append(f"{'groups' if t.offs_dim == 0 else 'groups_of_k'}={offs.shape[0]}")
        if t.hadamard_signs is not None:
            shown.append(f"hadamard_signs={t.hadamard_signs:#06x}")
        return shown

    def __repr__(self) -> str:
        """Shapes and numbers, no values, so that nothing synchronises."""
        if not all(isinstance(part, Tensor) for part in self._parts().values()):
            return f"{type(self).__name__}(...)"  # a pytree may carry anything in place of the tensors
        shown = [f"shape={tuple(self._size)}", *self._options()]
        if self.dtype is not torch.float32:
            shown.append(f"dtype={self.dtype}")
        return f"{type(self).__name__}({', '.join(shown)}, device={str(self.device)!r})"


def with_version(x: Tensor) -> tuple[Tensor, int | None]:
    """x and its count of changes in place, which torch keeps neither in inference mode nor in a graph."""
    return x, None if torch.compiler.is_compiling() or x.is_inference() else x._version


def unpickled(cls: Any, parts: dict[str, Any], numbers: dict[str, Any]) -> Any:
    """A container of the tensors and numbers in a file, after all checks. Misaligned tensors are copied.

    Raises:
        ValueError: the tensors do not form a container; the text names the class and the field.
    """
    for name, part in parts.items():
        if _checks.is_misaligned(part):
            parts[name] = part.clone()
    try:
        made = cls(**parts, **numbers)
        if made.device.type != "cpu":  # the constructor does it on the CPU
            made._check_values()
        return made
    except (TypeError, ValueError) as error:
        raise ValueError(f"fp4gemm.{cls.__name__}: is corrupt in this file: {error}") from error


def of_bytes(name: str, part: object, dtype: object) -> Tensor:
    """A float8 tensor of its pickled bytes."""
    x = _checks.is_tensor(name, part)
    _checks.has_dtype(name, x, (torch.uint8,))
    return x.view(dtype)  # type: ignore[no-any-return,call-overload]


def register(cls: type[Container]) -> None:
    """Make a subclass of Container a pytree node: its tensors are the leaves, its plain numbers the context.

    An optional tensor that is None is not a leaf. The context is (constants, names of the leaves).
    """

    def flatten(t: Any) -> tuple[list[Any], tuple[Any, ...]]:
        leaves, context = flatten_with_keys(t)
        return [leaf for _, leaf in leaves], context

    def flatten_with_keys(t: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        names = (*cls._tensors, *(name for name in cls._optional if getattr(t, name) is not None))
        leaves = [(pytree.GetAttrKey(name), getattr(t, name)) for name in names]
        return leaves, (tuple(getattr(t, name) for name in cls._constants), names)

    def unflatten(leaves: Any, context: tuple[Any, ...]) -> Any:
        constants, names = context
        fields: dict[str, Any] = dict.fromkeys(cls._optional)
        fields |= zip(cls._constants, constants, strict=True)
        return cls._assembled(fields | dict(zip(names, leaves, strict=True)))

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"fp4gemm.{cls.__name__}",
        to_dumpable_context=lambda context: [[_dumpable(value) for value in part] for part in context],
        from_dumpable_context=lambda context: tuple(tuple(map(_loaded, part)) for part in context),
        flatten_with_keys_fn=flatten_with_keys,
    )


def _dumpable(value: Any) -> Any:
    """A value that json accepts: the name of a dtype, a list for a tuple."""
    return str(value) if isinstance(value, torch.dtype) else value


def _loaded(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return torch.Size(value) if isinstance(value, list) else value
