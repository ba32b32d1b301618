"""Kernels by name: what a YAML or a checkpoint may say, and nothing it says is imported."""

from collections.abc import Callable
from typing import Any, TypeVar

from ksm_lightning.kernels.base import Kernel

K = TypeVar("K", bound=type[Kernel])

_KERNELS: dict[str, type[Kernel]] = {}


def register_kernel(name: str) -> Callable[[K], K]:
    """Class decorator: make a kernel known to configurations and checkpoints as ``name``.

    Raises:
        ValueError: If another class has the name already.

    Example:
        >>> @register_kernel("doctest_cubic")
        ... class Cubic(Kernel):
        ...     def gram(self, u, v):
        ...         return (u @ v.mT) ** 3
        >>> make_kernel("doctest_cubic")
        Cubic()
    """

    def register(cls: K) -> K:
        known = _KERNELS.get(name)
        # The same class defined again, as a reloaded module or a notebook cell does, replaces the old one.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"The kernel name {name!r} belongs to {known.__qualname__}; choose another name.")
        _KERNELS[name] = cls
        return cls

    return register


def kernel_names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_KERNELS)


def make_kernel(name: str, **params: Any) -> Kernel:
    """The kernel registered as ``name``, with its parameters.

    Raises:
        ValueError: If the name is not registered, or the parameters are not the kernel's.

    Example:
        >>> make_kernel("gaussian", sigma=0.3)
        GaussianKernel(sigma=0.3)
    """
    if name not in _KERNELS:
        raise ValueError(
            f"No kernel is registered as {name!r}; known are {', '.join(kernel_names())}. If it is your own, "
            f"import the module that defines it under @register_kernel({name!r}) before this call."
        )
    try:
        return _KERNELS[name](**params)
    except TypeError as error:
        raise ValueError(
            f"Kernel {name!r} cannot be made from {params or 'no parameters'}: {error}. Set its numbers in "
            "`kernel_params`."
        ) from error


def kernel_name(kernel: Kernel) -> str:
    """The name under which a kernel's class is registered.

    Raises:
        ValueError: If it is not registered.
    """
    for name, cls in _KERNELS.items():
        if cls is type(kernel):
            return name
    raise ValueError(
        f"{type(kernel).__name__} has no registered name, so no checkpoint can remember it: put "
        "@register_kernel('a_name') above its class."
    )
