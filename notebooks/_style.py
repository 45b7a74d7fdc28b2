"""One look for the notebooks' plots: colours that colour-blind readers can tell apart, labels beside what they name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure

# Said by tqdm, when transformers is imported in a notebook without ipywidgets; no progress bar is shown here anyway.
warnings.filterwarnings("ignore", message="IProgress not found")

INK, FAINT, RULE, PALE = "#24292f", "#6b7280", "#d9dde2", "#eff1f4"

FORMATS = {"bf16": "#b4bac2", "int8": "#0072b2", "fp8": "#56b4e9", "int4": "#d55e00", "fp4": "#e69f00"}
"""Number formats, by what a weight is stored as (palette of Okabe and Ito)."""

RANKS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c939c")
"""Tensor-parallel ranks 0 to 7."""

CENTRED = {"ha": "center", "va": "center"}

_OFFSETS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


def use() -> None:
    """Set matplotlib's defaults for what follows."""
    mpl.rcParams.update(
        {
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "font.size": 9.5,
            "text.color": INK,
            "axes.edgecolor": FAINT,
            "axes.labelcolor": INK,
            "axes.linewidth": 0.8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.axisbelow": True,
            "xtick.color": FAINT,
            "ytick.color": FAINT,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "grid.color": RULE,
            "grid.linewidth": 0.7,
        }
    )


def colour_of(number_format: str) -> str:
    """The colour of a number format, by the name that ``--quant`` has for it."""
    name = "fp4" if "fp4" in number_format else "int4" if number_format == "w4a8" else number_format
    return FORMATS[next((kind for kind in FORMATS if name.startswith(kind)), "fp8" if "fp8" in name else "bf16")]


def ink_on(colour: Any) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def short(name: str) -> str:
    """``model.layers.0.self_attn.q_proj`` -> ``q``."""
    return name.rsplit(".", 1)[-1].removesuffix("_proj")


def title(figure: Figure, text: str, note: str = "") -> None:
    """A heading at the left of a figure, and a line below it that says what is drawn."""
    figure.suptitle(text + ("\n" if note else ""), x=0.01, ha="left", fontsize=12, fontweight="bold")
    if note:
        height = figure.get_size_inches()[1]
        figure.text(0.01, 1 - 0.28 / height, note, ha="left", va="top", fontsize=9.5, color=FAINT)


def bare(axes: Axes) -> None:
    """Take the frame and the ticks away, where labels say it all."""
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def key(axes: Axes, entries: Mapping[str, str], *, x: float = 1.0, y: float = 1.0) -> None:
    """Coloured squares and what they mean, in a row that ends at ``x``, above the axes (a legend without a box)."""
    handles = [mpl.patches.Patch(facecolor=colour, label=name) for name, colour in entries.items()]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(x, y),
        ncols=len(entries),
        frameon=False,
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=1.3,
        handletextpad=0.5,
        borderaxespad=0.2,
    )


def heat(
    axes: Axes,
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    colours: Any = None,
    limits: tuple[float, float],
    cmap: str = "cividis",
    text: str = "{:.1f}",
) -> Any:
    """A heat map ``[rows, columns]`` with its numbers written into it; returns the image.

    Args:
        colours: what decides the colours, of the same shape, where that is not ``values``.
        limits: of what decides the colours.
    """
    table = np.asarray(values, dtype=float)
    shades = table if colours is None else np.asarray(colours, dtype=float)
    image = axes.imshow(shades, cmap=cmap, vmin=limits[0], vmax=limits[1], aspect="auto")
    for (row, column), value in np.ndenumerate(table):
        ink = ink_on(image.cmap(image.norm(shades[row, column])))
        axes.text(column, row, text.format(value), ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    bare(axes)
    # White lines between the cells.
    axes.set_xticks(np.arange(len(columns) - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    return image


def colour_bar(figure: Figure, image: Any, axes: Any, label: str) -> Colorbar:
    """A slim colour bar beside the axes that share it."""
    bar = figure.colorbar(image, ax=axes, fraction=0.025, pad=0.015, aspect=28)
    bar.outline.set_visible(False)
    bar.set_label(label)
    return bar


def label_points(axes: Axes, points: Sequence[tuple[float, float]], labels: Sequence[str], **text: Any) -> None:
    """Write a label beside each point, on the first side where it covers neither a point nor another label.

    Call it last: it measures what is drawn.
    """
    axes.figure.canvas.draw()
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    pixels = axes.transData.transform(points)
    taken = [mpl.transforms.Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in pixels]
    frame = axes.get_window_extent(renderer)
    for number, (point, label) in enumerate(zip(points, labels, strict=True)):
        found: list[tuple[int, int, Any, Any]] = []
        for distance in (7, 13):
            for dx, dy in _OFFSETS:
                written = axes.annotate(
                    label,
                    point,
                    (dx * distance, dy * distance),
                    textcoords="offset points",
                    ha=("right", "center", "left")[dx + 1],
                    va=("top", "center", "bottom")[dy + 1],
                    **text,
                )
                box = written.get_window_extent(renderer)
                others = taken[:number] + taken[number + 1 :]
                clashes = sum(box.overlaps(other) for other in others) + (not _inside(box, frame))
                found.append((clashes, len(found), written, box))
                if not clashes:
                    break
            if not found[-1][0]:
                break
        best = min(found, key=lambda each: each[:2])
        for each in found:
            if each is not best:
                each[2].remove()
        taken.append(best[3])


def _inside(box: Any, frame: Any) -> bool:
    return bool(box.x0 >= frame.x0 and box.x1 <= frame.x1 + 5 and box.y0 >= frame.y0 and box.y1 <= frame.y1 + 20)
