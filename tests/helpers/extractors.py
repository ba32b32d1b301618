"""A small feature extractor and its features by definition."""

import numpy as np
import torch

from helpers import references
from ksm_lightning import FeatureExtractor
from ksm_lightning.kernels import GaussianKernel, registry
from ksm_lightning.network.ksm_network import KSMNetwork
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.network.readout_matrices import LEAST_SQUARES_RIDGE, least_squares_matrix, nystroem_matrix

MEAN, SCALE = np.array([3.0, -2.0, 0.5, 10.0]), np.array([2.0, 0.5, 1.0, 4.0])


def network_of(kernel, seed=1, neurons=7, features=4) -> KSMNetwork:
    generator = torch.Generator().manual_seed(seed)
    network = KSMNetwork(kernel, features, neurons, ridge=0.01, generator=generator)
    with torch.no_grad():
        network.q.copy_(0.5 + torch.rand(neurons, generator=generator))
        root = torch.randn(neurons, neurons, generator=generator)
        L = torch.eye(neurons) + root @ root.mT / neurons
        network.L.copy_((L + L.mT) / 2)  # the product is symmetric up to rounding
    return network


def prepare() -> Preprocessing:
    return Preprocessing(torch.tensor(MEAN), torch.tensor(SCALE), image_shape=(2, 2))


def raw_points(count=40, seed=2) -> np.ndarray:
    return MEAN + SCALE * np.random.RandomState(seed).randn(count, 4)


def extractor_of(kernel=None, readout="neural", **options) -> FeatureExtractor:
    network = network_of(kernel or GaussianKernel(0.7))
    return FeatureExtractor.from_network(
        network, readout, sample=raw_points(60, seed=5), preprocessing=prepare(), **options
    )


def reference(spec, readout: str, raw: np.ndarray, num_features: int | None = None) -> np.ndarray:
    """The features by definition, in float64 and with loops for the kernel.

    Those of ``num_features`` are the leading principal components of the sample of :func:`extractor_of`, by the SVD.
    """
    network = network_of(registry.make_kernel(spec[0], **spec[1]))
    W, q, L = (p.detach().double() for p in (network.W, network.q, network.L))
    x = torch.tensor((raw.astype(np.float64) - MEAN) / SCALE)
    drive = references.gram(*spec, x, W).numpy()
    if readout == "neural":
        return drive * q.numpy() @ np.linalg.inv(L.numpy() + 0.01 * np.eye(len(L)))
    sample = torch.tensor((raw_points(60, seed=5) - MEAN) / SCALE)
    of_sample = references.gram(*spec, sample, W).numpy()

    def compressed(M: np.ndarray) -> np.ndarray:
        return M @ np.linalg.svd(of_sample @ M)[2][:num_features].T if num_features else M

    if readout == "nystroem":
        return drive @ compressed(nystroem_matrix(network.kernel, W).numpy())
    ridge = LEAST_SQUARES_RIDGE * network.kernel.diag(sample).mean()
    M = compressed(least_squares_matrix(network.kernel, W, sample, ridge=ridge).numpy())
    squares, directions = np.linalg.eigh(M.T @ references.gram(*spec, W, W).numpy() @ M)  # at most 4 near any point
    return drive @ M @ (directions * np.sqrt(np.minimum(1, 4 / np.maximum(squares, 1e-300)))) @ directions.T
