"""A digest of tensors and plain values, which tells whether a file holds what was written."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest_of(value: Any) -> str:
    """SHA-256 in hexadecimal digits of nested containers of tensors and plain values.

    Tensors count by dtype, shape and bytes, on any device and in any memory layout; mappings by their items in any
    order; plain values by type and ``repr``. An object of another type, which a checkpoint does not load anyway, counts
    by the name of its type.

    Raises:
        RecursionError: If the nesting is too deep, or a container holds itself.

    Example:
        >>> digest_of({"a": 1, "b": torch.zeros(2)}) == digest_of({"b": torch.zeros(2), "a": 1})
        True
        >>> len({digest_of(value) for value in (1, 1.0, True, "1", [1], (1,), torch.tensor(1), torch.tensor([1]))})
        8
    """
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})


def _add(digest: "hashlib._Hash", value: Any) -> None:
    # Every part starts with its type and size, so that no two values give the same bytes.
    if type(value) in _PLAIN:
        digest.update(_bytes_of(value))
    elif isinstance(value, Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=lambda key: (type(key).__name__, repr(key))):
            _add(digest, key)
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"{'list' if isinstance(value, list) else 'tuple'} {len(value)};".encode())
        if all(type(item) in _PLAIN for item in value):  # a history of thousands of numbers
            digest.update(b"".join(map(_bytes_of, value)))
            return
        for item in value:
            _add(digest, item)
    elif isinstance(value, set | frozenset):
        _add(digest, ["set", *sorted(map(repr, value))])
    else:
        digest.update(_bytes_of(value))


def _bytes_of(value: Any) -> bytes:
    is_plain = type(value) in _PLAIN or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype)
    text = repr(value) if is_plain else ""
    return f"{type(value).__name__} {len(text)};{text}".encode("utf-8", "surrogatepass")


def _add_tensor(digest: "hashlib._Hash", tensor: Tensor) -> None:
    tensor = tensor.detach()
    digest.update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
    if tensor.layout == torch.strided and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        # An expanded tensor, or a damaged file that claims a huge one: a contiguous copy might not fit into memory.
        digest.update(f"expanded {tensor.stride()} {tensor.storage_offset()};".encode())
        tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    flat = tensor.to_dense() if tensor.layout != torch.strided else tensor
    flat = flat.cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
