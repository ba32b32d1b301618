#!/usr/bin/env python3
"""Linear-probe accuracy of trained networks and of the pixels, for several numbers of labels per class.

.venv/bin/python scripts/probe_table.py --run alpha=3:runs/mnist/version_0/checkpoints/last.ckpt     minutes per network

The paper's MNIST networks are trained on all 70,000 images, test images included, without labels. With
--selection=validation (the default) the penalty is selected on 10,000 validation digits and the accuracy is that of the
10,000 test digits. With --selection=paper it is the best accuracy on the validation digits, as in the paper.
"""

import argparse
import csv
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.evaluation.linear_probe import PENALTIES, linear_probe
from ksm_lightning.module import KernelSimilarityMatching

LABELS = (1, 3, 10, 30, 100, 300, 1000, 3000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="append", default=[], metavar="NAME:CKPT", help="a network; can be repeated")
    parser.add_argument("--labels", type=int, nargs="+", default=LABELS, help="labelled digits per class")
    parser.add_argument("--seeds", type=int, default=5, help="random draws to average over. Default: 5")
    parser.add_argument("--selection", choices=["validation", "paper"], default="validation", help="see above")
    parser.add_argument("--no-pixels", action="store_true", help="omit the row of the pixels")
    parser.add_argument("--reference", type=Path, help="a CSV file of published accuracies; prints the differences")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    parser.add_argument("--data-dir", help="folder that holds MNIST/raw. Default: $KSM_DATA_DIR")
    options = parser.parse_args()
    try:
        table(options)
    except (ValueError, OSError) as error:
        sys.exit(f"probe_table: error: {' '.join(str(error).split())}")


def table(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = read_reference(options.reference) if options.reference else {}
    encoders = {} if options.no_pixels else {"pixels": None}
    for run in options.run:
        name, _, path = run.partition(":")
        if not path:
            raise ValueError(f"--run must be NAME:CKPT, for example alpha=3:last.ckpt, got {run!r}.")
        encoders[name] = KernelSimilarityMatching.load_from_checkpoint(path, map_location=device)
    sets = CroppedMNISTDataModule(data_dir=options.data_dir).probe_sets()
    rows = []
    print(f"{'':10}" + "".join(f"{labels:>16}" for labels in options.labels), flush=True)
    bar = tqdm(total=len(encoders) * len(options.labels), desc="Probes", leave=False)
    for name, model in encoders.items():
        # Encode each digit once for all draws.
        features = {
            part: ((x if model is None else model.features(x.to(device))), labels) for part, (x, labels) in sets.items()
        }
        line = f"{name:10}"
        for labels in options.labels:
            started = time.perf_counter()
            found = linear_probe(
                features["train"], features["validation"], features["test"],
                per_class=labels, seeds=range(options.seeds), penalties=PENALTIES, selection=options.selection,
            )  # fmt: skip
            rows.append((name, labels, found.accuracy, found.train_accuracy, found.penalty, found.deviation,
                         time.perf_counter() - started))  # fmt: skip
            published = reference.get((name, labels))
            difference = f" ({100 * (found.accuracy - published):+.2f})" if published is not None else ""
            line += f"{f'{100 * found.accuracy:.2f}{difference}':>16}"
            bar.update()
        tqdm.write(line)
        sys.stdout.flush()
    bar.close()
    print(
        f"Accuracy in %, {options.seeds} draws, selection: {options.selection}. In brackets: minus the published one."
    )
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["representation", "labels_per_class", "accuracy", "train_accuracy", "penalty", "deviation", "seconds"]
            )
            writer.writerows(rows)


def read_reference(path: Path) -> dict[tuple[str, int], float]:
    with path.open() as file:
        return {
            (row["representation"], int(row["labels_per_class"])): float(row["accuracy"])
            for row in csv.DictReader(file)
        }


if __name__ == "__main__":
    main()
