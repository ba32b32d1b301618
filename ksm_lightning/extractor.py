"""A trained network as a frozen feature extractor: raw input in, features out, nothing of the training needed."""

import hashlib
import json
import math
from collections.abc import Iterable
from importlib.metadata import version
from operator import length_hint
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ksm_lightning.files import draft_of
from ksm_lightning.kernels import Kernel, full_precision, kernel_name, make_kernel
from ksm_lightning.network.ksm_network import KSMNetwork
from ksm_lightning.network.preprocessing import Frozen, Preprocessing
from ksm_lightning.network.readout import Readout, check_readout, readout_matrix
from ksm_lightning.runs.checkpoint import network_of, preprocessing_of, read_checkpoint

if TYPE_CHECKING:
    from ksm_lightning.sklearn import FrozenTransformer

FORMAT = 1
"""Number of the format of saved extractors; it changes whenever older files would be misread."""
# float32 is good enough where it changes no feature by more than this part of the largest.
_ROUNDING = 3e-6


class FeatureExtractor(Frozen):
    """Features ``f(x, W) M`` of raw input x, a frozen ``nn.Module`` for ``nn.Sequential`` and the like.

    It takes what the datamodule of the training took: any floating-point or integer dtype, on any device, images in
    their own shape; centring, scaling and cropping are done inside. Features come in the dtype of the input, float32
    for integers. Inside, everything is float32 where that is exact to a few parts in a million, else float64, whatever
    is said to the surrounding model about precision. Gradients flow to the input; nothing here learns.

    Args:
        kernel: The similarity.
        W: Landmarks (n, m), in the dtype to compute in.
        M: Readout (n, k), in the same dtype.
        preprocessing: What is done to raw input; nothing unless given.
        readout: The name of the readout that M is.

    Raises:
        ValueError: If the shapes or dtypes do not belong together.

    Example:
        >>> from ksm_lightning import GaussianKernel, KSMNetwork
        >>> network = KSMNetwork(GaussianKernel(), in_features=4, num_neurons=8)
        >>> extractor = FeatureExtractor.from_network(network, readout="nystroem")
        >>> model = torch.nn.Sequential(extractor, torch.nn.Linear(extractor.out_features, 3))
        >>> model(torch.zeros(5, 2, 2)).shape  # image-shaped input is flattened
        torch.Size([5, 3])
    """

    def __init__(
        self,
        kernel: Kernel,
        W: Tensor,
        M: Tensor,
        preprocessing: Preprocessing | None = None,
        readout: Readout = "neural",
    ) -> None:
        super().__init__()
        if W.dim() != 2 or M.dim() != 2 or len(W) != len(M) or W.dtype != M.dtype:
            raise ValueError(
                f"Landmarks (n, m) and readout (n, k) belong together, got {tuple(W.shape)} in {W.dtype} and "
                f"{tuple(M.shape)} in {M.dtype}."
            )
        if preprocessing is not None and preprocessing.in_features != W.shape[1]:
            raise ValueError(
                f"The preprocessing is of {preprocessing.in_features} features, and the landmarks have {W.shape[1]}."
            )
        self.kernel = kernel
        prepare = Preprocessing.none(W.shape[1]) if preprocessing is None else preprocessing
        self.preprocessing = prepare.copy_to(W.device)
        self.readout = check_readout(readout)
        # Products depend on the layout in their last digits, and files know one layout alone.
        self.register_buffer("W", W.detach().clone(memory_format=torch.contiguous_format))
        self.register_buffer("M", M.detach().clone(memory_format=torch.contiguous_format))
        self.W: Tensor
        self.M: Tensor

    # ------------------------------------------------------------------ making one

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        readout: str = "neural",
        *,
        sample: Tensor | np.ndarray | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """The extractor of a checkpoint that ``ksm fit`` or a Trainer wrote; on the CPU, nothing in the file is run.

        Args:
            path: The ``.ckpt`` file.
            readout: ``neural`` (the paper's representation), ``nystroem`` or ``least_squares``.
            sample: Raw input like that of the training, for ``least_squares`` to be fitted to.
            dtype: float32 or float64 to compute in; the faster one that is exact enough unless given.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is no checkpoint, or a sample is missing.
        """
        content = read_checkpoint(path)
        return cls.from_network(
            network_of(content), readout, sample=sample, preprocessing=preprocessing_of(content), dtype=dtype
        )

    @classmethod
    @torch.no_grad()
    def from_network(
        cls,
        network: KSMNetwork,
        readout: str = "neural",
        *,
        sample: Tensor | np.ndarray | None = None,
        preprocessing: Preprocessing | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """The extractor of a network, on its device; see :meth:`from_checkpoint`.

        Raises:
            ValueError: If the readout is unknown, or its sample is missing or not one.
        """
        name = check_readout(readout)
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"An extractor computes in float32 or float64, got {dtype}.")
        if not all(bool(weights.isfinite().all()) for weights in (network.W, network.q, network.L)):
            raise ValueError("The network holds values that are not finite: it diverged, use an older checkpoint.")
        prepare = Preprocessing.none(network.in_features) if preprocessing is None else preprocessing
        x = None
        if name == "least_squares":
            if sample is None:
                raise ValueError("The least-squares readout is fitted to data: give it a `sample` of raw input.")
            raw = check_finite(as_tensor(sample), "The sample").to(network.W.device)
            x = prepare.copy_to(network.W.device)(raw)
        W, M = network.W.detach().double(), readout_matrix(network, name, x)
        if not bool(M.isfinite().all()):
            raise ValueError(f"The network has no {name} readout: its weights diverged, use an older checkpoint.")
        dtype = sufficient_dtype(network.kernel, W, M) if dtype is None else dtype
        return cls(network.kernel, W.to(dtype), M.to(dtype), prepare, name)

    # ------------------------------------------------------------------ features

    @property
    def in_features(self) -> int:
        """Input features m, after cropping."""
        return self.W.shape[1]

    @property
    def out_features(self) -> int:
        """Features that come out."""
        return self.M.shape[1]

    @property
    def raw_features(self) -> int:
        """Values of a point of raw input: its features, or its pixels before they are cropped."""
        return math.prod(self.preprocessing.raw_shape or (self.in_features,))

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.W.device

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, k) of a batch of raw input in any shape that has m values a point."""
        return self.features(self.preprocessing(x)).to(x.dtype if x.is_floating_point() else torch.float32)

    def features(self, rows: Tensor) -> Tensor:
        """Features (batch, k) of points (batch, m) that are standardised already, in the dtype that it computes in."""
        x = rows.to(self.W.dtype).contiguous()  # else the last digits would depend on how the rows lie in memory
        with full_precision(rows.device):
            features: Tensor = self.kernel(x, self.W) @ self.M
        return features

    @torch.no_grad()
    def transform(self, data: Any, batch_size: int = 4096, *, progress: bool = False) -> Any:
        """Features of any amount of data, a batch at a time, computed where the extractor is.

        Args:
            data: An array, a tensor or a data frame with a point a row, or a loader: batches that are tensors, or
                tuples that start with one.
            batch_size: Points at a time; a loader decides for itself.
            progress: Whether to show a progress bar.

        Returns:
            An array for an array or a data frame, a tensor on its own device for a tensor, and for a loader a tensor on
            the CPU.

        Raises:
            ValueError: If the data is empty, has another number of features, or holds NaN or infinity.
        """
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        is_array = not isinstance(data, Tensor) and hasattr(data, "__array__")
        home = data.device if isinstance(data, Tensor) else torch.device("cpu")
        parts = []
        blocks, total = _blocks(data, batch_size)
        for block in tqdm(blocks, total=total, desc="Features", unit="batch", disable=not progress):
            part = check_finite(as_tensor(block), "The input").to(self.device)
            features = self(part).to(home)
            if not is_finite(features):
                raise ValueError(
                    f"Features are out of the range of {features.dtype}: is the input like that of the training?"
                )
            parts.append(features)
        if not parts or not sum(map(len, parts)):
            raise ValueError("There is no input to make features of.")
        return torch.cat(parts).numpy() if is_array else torch.cat(parts)

    def to_sklearn(self) -> "FrozenTransformer":
        """A scikit-learn transformer that ``fit`` leaves as it is: trained once, frozen in every pipeline."""
        from ksm_lightning.sklearn import FrozenTransformer  # scikit-learn takes long to import

        return FrozenTransformer(self)

    # ------------------------------------------------------------------ files

    @property
    def metadata(self) -> dict[str, Any]:
        """What it is, in plain values."""
        shape = self.preprocessing.image_shape
        return {
            "format": FORMAT,
            "kernel": kernel_name(self.kernel),
            "kernel_params": self.kernel.params(),
            "readout": self.readout,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "image_shape": None if shape is None else list(shape),
            "crop": self.preprocessing.crop,
            "version": version("ksm_lightning"),
        }

    @property
    def identity(self) -> str:
        """Sixteen digits that are the same for the same features: kernel, landmarks, readout, preprocessing."""
        digest = hashlib.sha256()
        about = {name: value for name, value in self.metadata.items() if name != "version"}
        digest.update(json.dumps(about, sort_keys=True).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {tensor.dtype}".encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def description(self) -> dict[str, Any]:
        """What it is, with its identity: what files say of it."""
        return {"identity": self.identity, **self.metadata}

    def save(self, path: str | Path) -> Path:
        """Write it as one ``.safetensors`` file, whole or not at all; :meth:`load` reads it. Returns the path.

        Raises:
            ValueError: If the file is named otherwise, or the kernel has no registered name.
        """
        from safetensors.torch import save

        path = Path(path)
        if path.suffix != ".safetensors":
            raise ValueError(f"An extractor is saved as .safetensors, got {path}.")
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.state_dict().items()}
        with draft_of(path) as draft:
            draft.write_bytes(save(tensors, metadata={"ksm_lightning": json.dumps(self.description)}))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """An extractor that :meth:`save` or ``ksm export --format=safetensors`` wrote; on the CPU.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is damaged, of another format, or its kernel is not registered.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"There is no extractor {path}.")
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("ksm_lightning", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} is damaged, or no safetensors file: {error}.") from error
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError(f"{path} holds no feature extractor that this version of ksm_lightning can read.")
        try:
            kernel = make_kernel(about["kernel"], **about["kernel_params"])
            prepare = Preprocessing.from_state(
                {
                    "mean": tensors["preprocessing.mean"],
                    "scale": tensors["preprocessing.scale"],
                    "image_shape": about["image_shape"],
                    "crop": about["crop"],
                }
            )
            extractor = cls(kernel, tensors["W"], tensors["M"], prepare, about["readout"])
        except KeyError as error:
            raise ValueError(f"The extractor {path} is damaged: it lacks {error}.") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"The extractor {path} cannot be used: {error}") from error
        if extractor.identity != about.get("identity"):
            raise ValueError(f"The extractor {path} is damaged: its content is not what was saved.")
        return extractor

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, readout={self.readout!r}, "
            f"dtype={self.W.dtype}"
        )


@torch.no_grad()
def sufficient_dtype(kernel: Kernel, W: Tensor, M: Tensor) -> torch.dtype:
    """float32 where features are exact in it to a few parts in a million of the largest, else float64.

    A readout's matrix multiplies rounding, by up to 1e5 where landmarks are close to each other. It is tried at the
    landmarks and right beside them, where that shows most.

    Args:
        kernel: The similarity.
        W: Landmarks (n, m), float64.
        M: Readout (n, k), float64.
    """
    x = torch.cat([W, 0.99 * W + 0.01 * W.roll(1, 0)])
    with full_precision(W.device):
        exact = kernel(x, W) @ M
        rounded = kernel(x.float(), W.float()) @ M.float()
    is_close = (exact - rounded.double()).abs().max() <= _ROUNDING * exact.abs().max()
    return torch.float32 if bool(is_close) else torch.float64


def _blocks(data: Any, batch_size: int) -> tuple[Iterable[Any], int | None]:
    """Batches of raw input, and how many there are, if that is known; an array that is a file is read as they come."""
    if isinstance(data, Tensor) or hasattr(data, "__array__"):
        rows = data if isinstance(data, Tensor | np.ndarray) else np.asarray(data)
        if rows.ndim == 0:
            raise ValueError("Input has a point a row, got a single number.")
        count = max(1, math.ceil(len(rows) / batch_size))  # what is empty has a shape all the same
        return (rows[place * batch_size : (place + 1) * batch_size] for place in range(count)), count
    if not isinstance(data, Iterable):
        raise ValueError(f"Input must be an array, a tensor, a data frame or a loader, got a {type(data).__name__}.")
    inputs = (block[0] if isinstance(block, tuple | list) and len(block) else block for block in data)
    return inputs, length_hint(data) or None


def as_tensor(data: Any) -> Tensor:
    """A tensor of an array, a data frame or a tensor.

    Raises:
        ValueError: If it does not hold numbers.
    """
    if isinstance(data, Tensor):
        if data.is_complex():
            raise ValueError(f"Input must be real numbers, got {data.dtype}.")
        return data
    array = np.asarray(data)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"Input must be numbers, got {array.dtype} in a {type(data).__name__}.")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # no tensor is as long as a long double
        array = array.astype(np.float64)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides) or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(array)


def check_finite(x: Tensor, name: str) -> Tensor:
    """The tensor itself.

    Raises:
        ValueError: If it holds NaN or infinity.
    """
    if not is_finite(x):
        raise ValueError(f"{name} holds NaN or infinity: remove or fill such values first.")
    return x


def is_finite(x: Tensor) -> bool:
    """Whether no value is NaN or infinite; by a sum, which costs far less than a look at every value."""
    return not x.is_floating_point() or bool(x.sum().isfinite()) or bool(x.isfinite().all())
