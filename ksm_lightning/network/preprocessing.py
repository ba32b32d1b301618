"""What is done to raw input before a network sees it, kept with the network: cropping, centring, scaling."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn


class Frozen(nn.Module):
    """A module of buffers that move between devices but keep their dtype.

    A surrounding model that is cast to half precision would take their digits away for nothing: they are small.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


class Preprocessing(Frozen):
    """``x -> (x - mean) / scale`` of raw input that is flattened, and cropped first where it is an uncropped image.

    Args:
        mean: What is removed from each feature (m,); kept in float64.
        scale: What each feature is divided by (m,), positive; kept in float64.
        image_shape: Height and width of a point, where points are images.
        crop: Pixels cropped from each side of raw images.

    Raises:
        ValueError: If the numbers contradict each other.

    Example:
        >>> prepare = Preprocessing(torch.zeros(4), torch.full((4,), 2.0), image_shape=(2, 2), crop=1)
        >>> prepare(torch.ones(3, 1, 4, 4)).shape, prepare(torch.ones(3, 4))[0].tolist()
        (torch.Size([3, 4]), [0.5, 0.5, 0.5, 0.5])
    """

    def __init__(self, mean: Tensor, scale: Tensor, image_shape: tuple[int, int] | None = None, crop: int = 0) -> None:
        super().__init__()
        if mean.dim() != 1 or mean.shape != scale.shape or len(mean) == 0:
            raise ValueError(
                f"Mean and scale are one number a feature each, got shapes {tuple(mean.shape)} and "
                f"{tuple(scale.shape)}."
            )
        if image_shape is not None and math.prod(image_shape) != len(mean):
            raise ValueError(f"Images of {image_shape[0]} x {image_shape[1]} pixels do not have {len(mean)} features.")
        if crop < 0 or (crop and image_shape is None):
            raise ValueError(f"Only images can be cropped, by 0 pixels or more, got crop={crop} for {image_shape}.")
        self.register_buffer("mean", mean.detach().double().clone())
        self.register_buffer("scale", scale.detach().double().clone())
        self.mean: Tensor
        self.scale: Tensor
        self.image_shape = image_shape
        self.crop = crop
        self._is_none = False  # found out by those who make one: asking here would make the host wait for the device

    @classmethod
    def none(cls, in_features: int) -> Self:
        """Nothing is done to points of so many features."""
        made = cls(torch.zeros(in_features), torch.ones(in_features))
        made._is_none = True
        return made

    def copy_to(self, device: torch.device) -> Self:
        """A copy of its own on a device; this one stays where it is."""
        made = type(self)(self.mean.to(device), self.scale.to(device), self.image_shape, self.crop)
        made._is_none = self._is_none
        return made

    @property
    def in_features(self) -> int:
        """Features m of a point."""
        return len(self.mean)

    @property
    def raw_shape(self) -> tuple[int, int] | None:
        """Height and width of images that are cropped; None where nothing is."""
        if self.image_shape is None or not self.crop:
            return None
        return self.image_shape[0] + 2 * self.crop, self.image_shape[1] + 2 * self.crop

    def flatten(self, x: Tensor) -> Tensor:
        """Rows (batch, m) of a batch in any shape, cropped where it is of uncropped images.

        Raises:
            ValueError: If the batch does not have m features a point.
        """
        flat = x.flatten(1) if x.dim() > 1 else x
        raw = self.raw_shape
        if raw is not None and flat.dim() == 2 and flat.shape[1] == math.prod(raw):
            inside = slice(self.crop, -self.crop)
            return flat.view(-1, *raw)[:, inside, inside].flatten(1)
        if flat.dim() != 2 or flat.shape[1] != self.in_features:
            wanted = f"(batch, {self.in_features})"
            if self.image_shape is not None:
                height, width = raw or self.image_shape
                wanted += f" or images of {height} x {width} pixels"
            raise ValueError(f"Inputs must be {wanted}, got the shape {tuple(x.shape)}.")
        return flat

    def forward(self, x: Tensor) -> Tensor:
        """Standardised rows (batch, m): in float64, or as they came where neither mean nor scale is to be seen to."""
        rows = self.flatten(x)
        if self._is_none:
            return rows
        rows = rows.byte() if rows.dtype == torch.bool else rows  # true and false cannot be subtracted from
        return (rows - self.mean).div_(self.scale)  # float64, as mean and scale are

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._is_none = False  # the numbers are others now

    def inverse(self, rows: Tensor) -> Tensor:
        """Raw rows (batch, m), float64, of standardised ones; what was cropped is lost."""
        return rows.double() * self.scale + self.mean

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, which is what a checkpoint holds."""
        shape = None if self.image_shape is None else list(self.image_shape)
        return {"mean": self.mean.cpu(), "scale": self.scale.cpu(), "image_shape": shape, "crop": self.crop}

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """What :meth:`state` told.

        Raises:
            ValueError: If it is not such a state.
        """
        is_known = isinstance(state, Mapping) and set(state) == {"mean", "scale", "image_shape", "crop"}
        if not is_known or not all(isinstance(state[name], Tensor) for name in ("mean", "scale")):
            raise ValueError("What is known of the preprocessing is incomplete.")
        mean, scale, shape, crop = state["mean"], state["scale"], state["image_shape"], state["crop"]
        if not (bool(mean.isfinite().all()) and bool(scale.isfinite().all()) and bool((scale > 0).all())):
            raise ValueError("The preprocessing has a mean that is not finite, or a scale that is not positive.")
        sides = list(shape) if isinstance(shape, list | tuple) else []
        is_shape = len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
        if not (shape is None or is_shape) or not isinstance(crop, int):
            raise ValueError(f"The preprocessing has no possible image shape or crop: {shape}, {crop}.")
        made = cls(mean, scale, None if shape is None else (shape[0], shape[1]), crop)
        made._is_none = not bool(mean.any()) and bool((scale == 1).all())
        return made

    def extra_repr(self) -> str:
        image = "" if self.image_shape is None else f", image_shape={self.image_shape}, crop={self.crop}"
        return f"in_features={self.in_features}{image}"
