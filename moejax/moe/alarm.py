"""The alarm for token gerrymandering (report section 10.7): the balance loss falls while the load gets worse.

The balance loss is one plus a signed product of hard and soft imbalance. Where most scores tie with the winner's it
falls below one although few experts get all tokens, and a large weight rewards just that. So nothing is judged by
the loss: a run is told when requested imbalance rises while the loss falls.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

LOSS, IMBALANCE = "balance_loss", "moe/requested_max_over_mean"
"""Metrics that are compared."""

COUNT = "moe/gerrymandering_alarms"
"""Metric that counts the alarms of a run."""

WINDOW, MEMORY = 16, 128
"""Logged steps of a stretch, and of the memory whose first and last stretch are compared."""

LOSS_FALLS, IMBALANCE_RISES = 0.99, 1.1
"""Ratios of the medians of the last stretch over the first one that raise the alarm."""

CLEAR = 0.9
"""Share of pairs, one step of each stretch, that must agree with both medians: the load of single steps is noisy."""


class GerrymanderingAlarm:
    """Watches logged metrics.

    Attributes:
        count: Alarms so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._seen: deque[tuple[float, float]] = deque(maxlen=MEMORY)

    def update(self, row: Mapping[str, Any]) -> str | None:
        """Look at one row of metrics; return what to tell the user if the alarm goes off, which clears its memory."""
        if row.get(LOSS) is None or row.get(IMBALANCE) is None:
            return None
        self._seen.append((row[LOSS], row[IMBALANCE]))
        if len(self._seen) < 2 * WINDOW:
            return None
        rows = list(self._seen)
        (losses, loads), (new_losses, new_loads) = (zip(*part, strict=True) for part in (rows[:WINDOW], rows[-WINDOW:]))
        loss, load, new_loss, new_load = map(median, (losses, loads, new_losses, new_loads))
        moved = new_loss < LOSS_FALLS * loss and new_load > IMBALANCE_RISES * load
        if not (moved and _above(losses, new_losses) >= CLEAR and _above(new_loads, loads) >= CLEAR):
            return None
        self.count += 1
        self._seen.clear()
        return (
            f"warning: the balance loss fell from {loss:.3f} to {new_loss:.3f} while the most loaded expert went from "
            f"{load:.2f} to {new_load:.2f} times the mean: the router serves the loss, not the balance; try a smaller "
            "loss.balance_weight, or model.moe.selection_bias with loss.bias_rate"
        )


def _above(high: Sequence[float], low: Sequence[float]) -> float:
    """Share of pairs whose first value is the larger one."""
    return sum(a > b for a in high for b in low) / (len(high) * len(low))
