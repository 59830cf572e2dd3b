"""Find a curve's best learning rate and edges of stability with few rates.

The search starts with a coarse grid and extends it if the curve continues beyond an end. Then common rounds refine the
best rate by parabolas, and bisect for the largest rate with a stable verdict and for the largest with an NLL near the
best. The module is pure (no files, no clock, no torch): equal results give equal requests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stability.config.rates import EdgeSettings, round_lr

ROUNDING = 0.0044  # decades by which rounding to three digits can separate two neighbours
NEAR = 1 / 3  # of the resolution: minimum distance between two rates


@dataclass(frozen=True)
class Outcome:
    """The end of one seed's run; ``nll`` is its validation NLL in nats, None or not finite after divergence."""

    verdict: str
    nll: float | None


@dataclass(frozen=True)
class Point:
    """A tried rate with all its seeds.

    Attributes:
        lr: the learning rate.
        verdicts: one verdict per seed.
        nll: median validation NLL in nats over the seeds. Divergence counts as ∞, as in the report's windows.
    """

    lr: float
    verdicts: tuple[str, ...]
    nll: float

    @property
    def x(self) -> float:
        return math.log10(self.lr)

    @property
    def is_stable(self) -> bool:
        return all(verdict == "stable" for verdict in self.verdicts)

    @property
    def is_idle(self) -> bool:
        """Whether the rate is too small: no seed diverged or spiked, but not every seed learned."""
        return all(verdict in ("stable", "plateaued") for verdict in self.verdicts) and not self.is_stable


@dataclass(frozen=True)
class Edge:
    """An edge of stability of a curve.

    Attributes:
        lr: the largest good rate, or None without one.
        next_lr: the smallest bad rate above it (or of all), or None if no higher tried rate is bad.
        exceptions: bad rates below ``lr``: the curve is not monotone.
    """

    lr: float | None
    next_lr: float | None
    exceptions: tuple[float, ...] = ()


@dataclass(frozen=True)
class Found:
    """The best rate and the edges of a curve, as far as determined.

    Attributes:
        best_lr: the rate of the lowest NLL.
        best_nll: its NLL in nats.
        best_low: the next lower rate, or None at the end of the range. The true best lies between ``best_low`` and
            ``best_high``.
        best_high: the next higher rate, or None at the end of the range.
        by_verdict: the edge according to verdicts.
        by_nll: the edge according to the NLL.
        num_rates: number of tried rates.
        num_grid_rates: number of rates of a grid with the same resolution over the tried range.
        resolved: whether each bracket is as narrow as requested, or its target lies outside the range.
    """

    best_lr: float | None
    best_nll: float | None
    best_low: float | None
    best_high: float | None
    by_verdict: Edge
    by_nll: Edge
    num_rates: int
    num_grid_rates: int
    resolved: bool


class Curve:
    """The ask-and-tell search of one curve, learning rate to verdict and NLL.

    ``grid``: the coarse rates, in ascending order.
    """

    def __init__(self, grid: Sequence[float], settings: EdgeSettings):
        self.points: dict[float, Point] = {}
        self._grid, self._settings = tuple(grid), settings
        self._spacing = max(math.log10(grid[-1] / grid[0]) / (len(grid) - 1), settings.resolution_decades)
        self._flank = settings.resolution_decades - ROUNDING
        self._most = most_rates(grid, settings)

    def ask(self) -> tuple[float, ...]:
        """Return the rates of the next round; () at the end.

        Their runs may be concurrent. Without a tell in between, the result is the same.
        """
        missing = tuple(lr for lr in self._grid if lr not in self.points)
        return missing or self._propose()[: self._most - len(self.points)]

    def tell(self, lr: float, outcomes: Iterable[Outcome]) -> None:
        """Record the outcomes of one rate, one per seed."""
        ends = tuple(outcomes)
        nlls = [end.nll if end.nll is not None and math.isfinite(end.nll) else math.inf for end in ends]
        self.points[lr] = Point(lr, tuple(end.verdict for end in ends), statistics.median(nlls))

    def summarise(self) -> Found:
        """Return the result from the rates recorded so far."""
        points, best = self._sort_points(), self._best()
        below = [point.lr for point in points if best is not None and point.lr < best.lr]
        above = [point.lr for point in points if best is not None and point.lr > best.lr]
        span = math.log10(points[-1].lr / points[0].lr) if points else 0.0
        return Found(
            best_lr=None if best is None else best.lr,
            best_nll=None if best is None else best.nll,
            best_low=below[-1] if below else None,
            best_high=above[0] if above else None,
            by_verdict=self._edge(_is_stable, self._list_too_small()),
            by_nll=self._edge(
                self._is_near_best, [] if best is None else [point.lr for point in points if point.lr < best.lr]
            ),
            num_rates=len(points),
            num_grid_rates=math.ceil(span / self._settings.resolution_decades - 1e-9) + 1,
            resolved=len(points) >= len(self._grid) and not self._propose(),
        )

    def _sort_points(self) -> list[Point]:
        return [self.points[lr] for lr in sorted(self.points)]

    def _best(self) -> Point | None:
        """Return the point of the lowest NLL, at ties the smallest rate; None if every rate diverged."""
        return min(
            (point for point in self._sort_points() if math.isfinite(point.nll)),
            key=lambda point: point.nll,
            default=None,
        )

    def _is_near_best(self, point: Point) -> bool:
        best = self._best()
        return best is not None and point.nll <= best.nll + self._settings.nll_tolerance * abs(best.nll)

    def _list_too_small(self) -> list[float]:
        """Return the too small rates below all stable ones; they are no gaps in stability."""
        stable = [point.lr for point in self._sort_points() if point.is_stable]
        return [point.lr for point in self._sort_points() if point.is_idle and (not stable or point.lr < stable[0])]

    def _edge(self, is_inside: Callable[[Point], bool], excused: Sequence[float]) -> Edge:
        points = self._sort_points()
        lr = max((point.lr for point in points if is_inside(point)), default=None)
        above = [point.lr for point in points if lr is None or point.lr > lr]
        holes = tuple(
            point.lr
            for point in points
            if lr is not None and point.lr < lr and not is_inside(point) and point.lr not in excused
        )
        return Edge(lr, above[0] if above else None, holes)

    def _propose(self) -> tuple[float, ...]:
        """Return new rates to narrow the brackets, separated from each other and tried rates."""
        positions = self._extension() or [
            *self._refinement(),
            *self._bisection(_is_stable),
            *self._bisection(self._is_near_best),
        ]
        kept: list[float] = []
        taken = [point.x for point in self.points.values()]
        for position in positions:
            if all(abs(position - other) > NEAR * self._settings.resolution_decades for other in taken):
                taken.append(position)
                kept.append(round_lr(10**position))
        return tuple(kept)

    def _extension(self) -> list[float]:
        """Return at most one position (log10 of a rate) beyond each open end.

        Steps grow up to the settings' limit.
        """
        points, best = self._sort_points(), self._best()
        low, high, most = math.log10(self._grid[0]), math.log10(self._grid[-1]), self._settings.extend_decades
        found = []
        if (points[-1].is_stable or self._is_near_best(points[-1])) and points[-1].x < high + most - self._flank:
            found.append(high + min(2 * (points[-1].x - high) + self._spacing, most))
        nothing_stable = not any(point.is_stable or point.is_idle for point in points)
        if (nothing_stable or best is None or best is points[0]) and points[0].x > low - most + self._flank:
            found.append(low - min(2 * (low - points[0].x) + self._spacing, most))
        return found

    def _refinement(self) -> list[float]:
        """Return positions to bracket the best rate within the resolution."""
        best = self._best()
        if best is None:
            return []
        points, resolution = self._sort_points(), self._settings.resolution_decades
        place = points.index(best)
        left, right = points[place - 1] if place else None, points[place + 1] if place + 1 < len(points) else None
        gaps = {side: abs(other.x - best.x) for side, other in ((-1, left), (1, right)) if other is not None}
        wide = {side: gap for side, gap in gaps.items() if gap > resolution}
        if len(wide) == 2 and left is not None and right is not None:
            center = min(max(_vertex(left, best, right), left.x + self._flank), right.x - self._flank)
            if abs(center - best.x) > self._flank / 2:
                return [center, center - self._flank, center + self._flank]
        found = [best.x + side * (gap / 2 if gap <= 2 * resolution else self._flank) for side, gap in wide.items()]
        # also the middle of the gap, so that the range halves even if the best moves in that direction
        return found + ([best.x + side * gap / 2 for side, gap in wide.items()] if len(wide) == 1 else [])

    def _bisection(self, is_inside: Callable[[Point], bool]) -> list[float]:
        """Return the middle between the largest rate inside and the next one.

        The list is empty at the resolution. Without a rate inside, the too small rates take its place.
        """
        points = self._sort_points()
        inside = [point.x for point in points if is_inside(point)] or [point.x for point in points if point.is_idle]
        above = [point.x for point in points if inside and point.x > inside[-1]]
        if not above or above[0] - inside[-1] <= self._settings.resolution_decades:
            return []
        return [(inside[-1] + above[0]) / 2]


def most_rates(grid: Sequence[float], settings: EdgeSettings) -> int:
    """Return a curve's maximum number of rates.

    They are the grid, both extensions, two bisections and the refinement of the widest possible gap.
    """
    spacing = max(math.log10(grid[-1] / grid[0]) / (len(grid) - 1), settings.resolution_decades)
    reach, steps, widest = 0.0, 0, spacing
    while reach < settings.extend_decades:
        step = min(reach + spacing, settings.extend_decades - reach)
        reach, steps, widest = reach + step, steps + 1, max(widest, step)
    halvings = math.ceil(math.log2(max(2.0, widest / settings.resolution_decades)))
    return len(grid) + 2 * steps + 2 * halvings + 3 + 2 * (halvings + 1)


def _is_stable(point: Point) -> bool:
    return point.is_stable


def _vertex(left: Point, best: Point, right: Point) -> float:
    """Return the minimum of the parabola through three points.

    It is the best point itself if a neighbour diverged or the points are collinear.
    """
    down, up = (left.nll - best.nll) / (best.x - left.x), (right.nll - best.nll) / (right.x - best.x)
    if not (math.isfinite(down) and math.isfinite(up)) or down + up <= 0:
        return best.x
    # slopes at the middles of the two gaps are -down and up; the vertex is the zero of the slope between them
    return (left.x + best.x) / 2 + (right.x - left.x) / 2 * down / (down + up)
