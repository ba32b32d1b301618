"""What a run leaves out that ends before its schedule, by max_steps, max_epochs, EarlyStopping or Timer."""

from ksm_lightning.learning.schedule import PhaseSchedule, Schedule


def cut_short(schedule: Schedule, done: int, consolidates: bool) -> str | None:
    """One sentence about a run of ``done`` updates; None if its schedule is complete.

    Args:
        schedule: The schedule of the run.
        done: Number of updates done.
        consolidates: Whether the end of the schedule would set L to its exact value.

    Example:
        >>> from ksm_lightning.learning import AdaptiveSchedule
        >>> cut_short(AdaptiveSchedule(2000), 150, consolidates=True)
        'Stopped at 150 of 2,000 updates: rates not annealed, L not consolidated.'
    """
    if done >= schedule.total_updates:
        return None
    missing = []
    if isinstance(schedule, PhaseSchedule):
        ends = [*schedule.phase_ends, schedule.total_updates]
        if len(ends) > 1:
            missing.append(f"{sum(end <= done for end in ends)} of {len(ends)} phases done")
        now, last = schedule.kernel_params(max(done - 1, 0)), schedule.kernel_params(schedule.total_updates - 1)
        if now != last:
            missing.append(f"trained with another kernel ({', '.join(f'{k}={v:g}' for k, v in now.items())})")
    elif schedule.is_natural:
        first, reached = (schedule.rates(update, 1, 1).W for update in (0, done))
        part = 100 * reached / first
        missing.append("rates not annealed" if part >= 100 else f"rates annealed to {part:.0f} % only")
    if consolidates:
        missing.append("L not consolidated")
    reasons = f": {', '.join(missing)}" if missing else ""
    return f"Stopped at {done:,} of {schedule.total_updates:,} updates{reasons}."
