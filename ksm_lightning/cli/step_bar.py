"""The progress bar of the commands without a Trainer."""

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from ksm_lightning.baselines.comparison import OnStep


@contextmanager
def step_bar(is_shown: bool) -> Iterator[OnStep]:
    """A progress bar with a description of the current step; call the result at the start of each step."""
    with tqdm(total=1, disable=not is_shown, bar_format="{percentage:3.0f}% |{bar:20}| {elapsed} {desc}") as bar:

        def on_step(text: str, done: int, total: int) -> None:
            bar.total = max(total, 1)
            bar.set_description_str(text, refresh=False)
            bar.update(done - bar.n)
            bar.refresh()

        yield on_step
        on_step("done", int(bar.total or 1), int(bar.total or 1))
