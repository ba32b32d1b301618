"""Checkpoints every n updates, written atomically."""

import re
from pathlib import Path

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from helpers.runs import model, moons, trainer
from ksm_lightning.callbacks import UpdateCheckpoint
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.runs.checkpoint import read_checkpoint


def test_checkpoints_are_written_on_time_and_replaced_atomically(tmp_path):
    callback = UpdateCheckpoint(every_n_updates=30, keep_all=True)
    run = trainer([callback], default_root_dir=tmp_path, enable_checkpointing=True)
    run.fit(model(phases=[Phase(70)]), datamodule=moons())
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "last.ckpt",
        "update-0000030.ckpt",
        "update-0000060.ckpt",
        "update-0000070.ckpt",
    ]
    for name, updates in (("last", 70), ("update-0000030", 30), ("update-0000060", 60)):
        assert read_checkpoint(folder / f"{name}.ckpt")["global_step"] == updates


def test_a_failed_write_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    callback = UpdateCheckpoint(every_n_updates=10)
    run = trainer([callback], default_root_dir=tmp_path, enable_checkpointing=True)
    original = SingleDeviceStrategy.save_checkpoint

    def fail_later(self, content, path, **options):
        if content["global_step"] >= 20:
            Path(path).write_bytes(b"half")
            raise OSError("No space left on device")
        original(self, content, path, **options)

    monkeypatch.setattr(SingleDeviceStrategy, "save_checkpoint", fail_later)
    kept = re.escape(str(tmp_path / "checkpoints" / "last.ckpt"))
    with pytest.raises(OSError, match=rf"could not be written \(No space left on device\); {kept} is unchanged"):
        run.fit(model(phases=[Phase(40)]), datamodule=moons())
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 10
