"""The model card of a feature extractor: what it computes, how it was trained, and how to use it."""

import json
from typing import Any

METADATA = {
    "library_name": "ksm_lightning",
    "pipeline_tag": "feature-extraction",
    "tags": ["kernel-methods", "hebbian-learning", "kernel-similarity-matching"],
}

_TEMPLATE = """# {title}

A frozen feature map, learned by kernel similarity matching: the products `y_s . y_t` of its {out_features} features
approximate the kernel `f(x_s, x_t)`. It was made with `ksm_lightning`.

| | |
| --- | --- |
{rows}

## Usage

```python
import numpy as np
from ksm_lightning import FeatureExtractor  # pip install 'ksm-lightning[hub]'

extractor = FeatureExtractor.from_pretrained({name})
x = np.zeros({shape})  # raw input, one point per row; centring and scaling are included
y = extractor.transform(x)  # (10, {out_features})
```

The extractor is an `nn.Module` without trainable parameters: put it in front of your own layers, or call
`extractor.to_sklearn()` for a scikit-learn transformer.
"""


def card_text(description: dict[str, Any], landmarks: int, training: dict[str, Any] | None, name: str) -> str:
    """The text of a model card, without its metadata.

    Args:
        description: Identity and metadata of the extractor.
        landmarks: Number of landmarks.
        training: How it was trained, see :func:`~ksm_lightning.hub.provenance.provenance_of`, or None.
        name: Name of the repository or folder, for ``from_pretrained``.
    """
    rows = {**_extractor_rows(description, landmarks), **_training_rows(training or {}, description)}
    side = description["image_shape"]
    shape = (10, *(each + 2 * description["crop"] for each in side)) if side else (10, description["in_features"])
    return _TEMPLATE.format(
        title=name.rpartition("/")[2],
        name=json.dumps(name),
        out_features=description["out_features"],
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        shape=shape,
    )


def _extractor_rows(about: dict[str, Any], landmarks: int) -> dict[str, str]:
    params = "".join(f", {name} = {value:g}" for name, value in about["kernel_params"].items())
    crop = f", after {about['crop']} pixels are cropped from each side" if about["crop"] else ""
    side = f" ({about['image_shape'][0]} x {about['image_shape'][1]} pixels{crop})" if about["image_shape"] else ""
    return {
        "kernel": about["kernel"] + params,
        "features": f"{about['out_features']}, readout {about['readout']} of {landmarks:,} landmarks",
        "input": f"{about['in_features']:,} numbers per point{side}",
        "extractor": f"{about['identity']}, written by ksm_lightning {about['version']}",
    }


def _training_rows(training: dict[str, Any], about: dict[str, Any]) -> dict[str, str]:
    """Rows about the training, without those of which nothing is known."""
    known = {key: f"{value:,}" if type(value) is int else value for key, value in training.items()}
    rows = {}
    if known.get("points") is not None:
        scaled = {"none": "not scaled", "global": "scaled by one number", "feature": "each feature scaled"}
        name = f"{known['data']}: " if known.get("data") else ""
        rows["data"] = (
            f"{name}{known['points']} points of {known.get('features')} features, "
            f"{'centred' if known.get('centre') else 'not centred'}, {scaled.get(str(known.get('scaling')), 'scaled')}"
        )
    if known.get("updates") is not None:
        batch = f" of {known['batch_size']} points" if known.get("batch_size") else ""
        rows["training"] = (
            f"{known.get('neurons')} neurons, {known.get('bound')} bound, {known['updates']} updates{batch}, "
            f"seed {training.get('seed')}"
        )
    # Errors are those of readouts with as many features as neurons.
    errors = training.get("kernel_nrmse") or {}
    if errors and about["out_features"] == training.get("neurons"):
        order = sorted(errors, key=lambda readout: readout != about["readout"])
        rows["kernel NRMSE on the training data"] = ", ".join(f"{errors[each]:.4g} ({each})" for each in order)
    return rows
