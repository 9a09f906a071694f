"""Where an array's memory is.

A view is a tuple of address, number of bytes, element type, and the object to hold while the memory
is in use. It is made from anything with the buffer protocol (NumPy arrays, `bytearray`,
`array.array`, `memoryview`), from PyTorch tensors on the CPU, and, by way of NumPy, from anything
else with DLPack.
"""

from __future__ import annotations

import ctypes
import sys

#: Element types by their letter in the buffer protocol, for the sizes on this machine.
_FORMATS = {"e": "f16", "f": "f32", "d": "f64", "b": "i8", "B": "u8"}
for _letters, _kind in (("hilq", "i"), ("HILQ", "u")):
    for _letter in _letters:
        _FORMATS[_letter] = f"{_kind}{8 * memoryview(bytes(8)).cast(_letter).itemsize}"

#: Element types that farwire can add.
_ADDABLE = frozenset(("f16", "bf16", "f32", "f64", "i8", "i32", "i64", "u8", "u32", "u64"))

#: Element types of PyTorch, by the last part of their name.
_TORCH = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int8": "i8",
    "int32": "i32", "int64": "i64", "uint8": "u8", "uint32": "u32", "uint64": "u64",
}  # fmt: skip

#: Complex numbers: their sums are the sums of the parts.
_PAIRS = {"complex64": "f32", "complex128": "f64", "Zf": "f32", "Zd": "f64"}

_torch_dtypes: dict = {}


def view(array, *, adds: str | None = None) -> tuple:
    """The view of an array that is read and written in place.

    With `adds`, the operator that combines elements, the type must be one that farwire can add.
    Without it, elements of any type can move, as bytes if need be.
    """
    if hasattr(array, "data_ptr"):
        return _of_tensor(array, adds)
    try:
        memory = memoryview(array)
    except (TypeError, ValueError, BufferError) as error:
        return _other(array, adds, error)
    if memory.readonly:
        raise TypeError(f"this {type(array).__name__} is read-only; give an array that is writable")
    if not memory.c_contiguous:
        raise TypeError("the array is not contiguous; give `numpy.ascontiguousarray(array)`")
    dtype = _dtype(memory.format.lstrip("@=<"), adds, array)
    if "O" in memory.format and getattr(getattr(array, "dtype", None), "hasobject", True):
        raise TypeError(
            "the array holds Python objects, which are addresses in this process; "
            "give an array of numbers"
        )
    if memory.nbytes == 0:
        return (0, 0, dtype, memory)
    # This object exports the buffer for as long as it is held.
    start = ctypes.c_char.from_buffer(memory)
    return (ctypes.addressof(start), memory.nbytes, dtype, start)


def _dtype(name: str, adds: str | None, array) -> str:
    dtype = _FORMATS.get(name) or _TORCH.get(name)
    if dtype in _ADDABLE:
        return dtype
    if adds is None:
        return "u8"
    if name in _PAIRS and adds in ("sum", "mean", "avg"):
        return _PAIRS[name]
    if name in _PAIRS:
        raise TypeError(f"complex numbers have no {adds!r}; use op='sum' or op='mean'")
    shown = getattr(array, "dtype", name)
    raise TypeError(
        f"farwire cannot add elements of type {shown}; it can move them (broadcast, gather, "
        "all-to-all, messages), and add float16, bfloat16, float32, float64, int8, uint8, "
        "int32, uint32, int64 and uint64"
    )


def _of_tensor(tensor, adds: str | None) -> tuple:
    if tensor.device.type != "cpu":
        raise TypeError(
            f"the tensor is on {tensor.device}; copy it to the CPU, or use farwire.torch"
        )
    if tensor.layout is not sys.modules["torch"].strided:
        raise TypeError(f"the tensor is {tensor.layout}; give `tensor.to_dense()`")
    if not tensor.is_contiguous():
        raise TypeError("the tensor is not contiguous; give `tensor.contiguous()`")
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError(
            "the tensor is a view of values that are yet to be conjugated or negated; "
            "give `tensor.resolve_conj().resolve_neg()`"
        )
    # This holds the memory, even if the tensor is given other memory meanwhile.
    return (tensor.data_ptr(), tensor.nbytes, tensor_dtype(tensor, adds), tensor.detach())


def tensor_dtype(tensor, adds: str | None = "sum") -> str:
    """The element type of a PyTorch tensor on any device."""
    found = _torch_dtypes.get((tensor.dtype, adds))
    if found is None:
        found = _dtype(str(tensor.dtype).removeprefix("torch."), adds, tensor)
        _torch_dtypes[tensor.dtype, adds] = found
    return found


def _other(array, adds: str | None, error: Exception) -> tuple:
    interface = getattr(array, "__array_interface__", None)
    if interface is not None and sys.byteorder == "little":
        # A NumPy array whose type the buffer protocol cannot name, such as bfloat16.
        address, is_readonly = interface["data"]
        if is_readonly or not array.flags.c_contiguous:
            raise TypeError("the array is read-only or not contiguous; give a contiguous copy")
        return (address, array.nbytes, _dtype(str(array.dtype), adds, array), array)
    if hasattr(array, "__dlpack__"):
        import numpy

        return view(numpy.from_dlpack(array), adds=adds)
    raise TypeError(
        f"{type(array).__name__} has neither the buffer protocol nor DLPack; give a NumPy array, "
        "a tensor on the CPU, or a bytearray"
    ) from error
