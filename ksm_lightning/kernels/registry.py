"""Registry of kernel names for configurations and checkpoints; a name never triggers an import."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from ksm_lightning.kernels.base import Kernel, constructor_arguments

K = TypeVar("K", bound=type[Kernel])

_KERNELS: dict[str, type[Kernel]] = {}


def register_kernel(name: str) -> Callable[[K], K]:
    """Class decorator that registers a kernel as ``name`` for configurations and checkpoints.

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
        # A reloaded module or a notebook cell defines the same class again; the new one replaces the old.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"The kernel name {name!r} belongs to {known.__qualname__}; choose another name.")
        _KERNELS[name] = cls
        return cls

    return register


def kernel_names() -> list[str]:
    """Registered names, sorted."""
    return sorted(_KERNELS)


def make_kernel(name: str, **params: Any) -> Kernel:
    """Construct the kernel registered as ``name``.

    Example:
        >>> make_kernel("gaussian", sigma=0.3)
        GaussianKernel(sigma=0.3)
    """
    cls = _class_of(name)
    try:
        return cls(**params)
    except TypeError as error:
        known = constructor_arguments(cls)
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        problem = f"it has no parameter {unknown[1]!r}" if unknown else str(error)
        raise ValueError(
            f"Kernel {name!r} cannot be made from {params or 'no parameters'}: {problem}. Its parameters, which are "
            f"set in `kernel_params`, are: {', '.join(known) or 'none'}."
        ) from error


def kernel_parameters(name: str) -> tuple[str, ...]:
    """Names of the parameters of the kernel registered as ``name``.

    Example:
        >>> kernel_parameters("gaussian"), kernel_parameters("linear")
        (('sigma',), ())
    """
    return constructor_arguments(_class_of(name))


def _class_of(name: str) -> type[Kernel]:
    if name not in _KERNELS:
        raise ValueError(
            f"No kernel is registered as {name!r}; known kernels: {', '.join(kernel_names())}. For your own kernel, "
            f"import the module that defines it under @register_kernel({name!r}) before this call."
        )
    return _KERNELS[name]


def kernel_name(kernel: Kernel) -> str:
    """Registered name of a kernel's class. Raises ValueError if it has none."""
    for name, cls in _KERNELS.items():
        if cls is type(kernel):
            return name
    raise ValueError(
        f"{type(kernel).__name__} has no registered name, so it cannot be saved: decorate its class with "
        "@register_kernel('a_name')."
    )
