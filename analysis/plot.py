"""Pictures. Imports nothing of the project."""
import math
import textwrap

import matplotlib

matplotlib.use("Agg")  # files only: no screen is needed
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import AutoLocator, EngFormatter, LogLocator, MaxNLocator, NullFormatter  # noqa: E402
from matplotlib.transforms import ScaledTranslation  # noqa: E402

LEGEND = 8  # entries that a legend inside of the axes has at most; a longer one would cover the curves, and goes below


def draw(path, panels, title="", caption=""):
    """
    A picture of panels side by side, four or more in two rows, each a dict:
        series   {name: [(xs, ys), ...]}: one line per repetition (seed), all in the name's colour and style; xs may be words
        x, y     names and units of the axes
        title    above the panel
        zero     True: a line at 0; zero_x: an upright one
        log      which axes are logarithmic: "", "x", "y" or "xy"
        marks    True: points on the lines
        apart    True: points without lines, for xs that are words with no order
        whole    True: ticks of x at whole numbers only, such as layers
        bands    {name: (xs, low, high)}: a shaded band in the name's colour
        points   {name: (xs, ys)}: points in the name's colour, apart from its line, and without one what the legend shows;
                 hollow: the names whose points aren't filled
        like     {name: another whose colour it has, too}; dashed: the names whose lines are broken
        order    ys that are words, from below upwards, in this order
        at       {name: x}: a thin vertical line in the name's colour, where its curve crosses zero; the legend has x
    caption: what to look for, below all.
    """
    rows = 1 if len(panels) < 4 else 2
    columns = -(-len(panels) // rows)
    width = 8 if len(panels) == 1 else 4.8 * columns
    figure = Figure(figsize=(width, 5 if rows == 1 else 8), dpi=120, layout="constrained")
    lines = [0] * rows  # of the longest legend below the axes, in each row of panels
    order = {}  # name: its number, by which it has one colour in all panels; other names start again
    for panel in panels:
        after = len(order) if order.keys() & panel["series"].keys() else 0
        like = panel.get("like", {})
        order |= {name: after + i for i, name in enumerate(n for n in panel["series"] if n not in order and n not in like)}
        order |= {name: order[other] for name, other in like.items()}
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes in list(places)[len(panels):]:
        axes.remove()
    for number, (axes, panel) in enumerate(zip(figure.axes, panels)):
        if panel.get("zero"):
            axes.axhline(0, color="0.5", linewidth=1)
        if panel.get("zero_x"):
            axes.axvline(0, color="0.5", linewidth=1)
        if panel.get("order"):
            axes.yaxis.update_units(panel["order"])
        names = list(panel["series"])
        for name in names:
            i = order[name]
            look = dict(color=f"C{i % 10}", linestyle=("-", "--", ":", "-.")[i // 10 % 4], linewidth=1.2)
            if name in panel.get("dashed", ()):
                look["linestyle"] = "--"
            marker = "osD^"[i // 10 % 4] if panel.get("marks") or panel.get("apart") else None
            at = panel.get("at", {}).get(name)
            label = name if at is None else f"{name} (0 at {at:,.0f})"
            for xs, ys in panel["series"][name]:
                if len(xs):
                    axes.plot(xs, ys, **{**look, "linestyle": ""} if panel.get("apart") else look, marker=marker,
                              markersize=3.5, label=label)
                    label = None
            if name in panel.get("bands", {}):
                axes.fill_between(*panel["bands"][name], color=look["color"], alpha=0.2, linewidth=0)
            if name in panel.get("points", {}):
                axes.plot(*panel["points"][name], color=look["color"], linestyle="", marker="o", markersize=4, label=label,
                          markerfacecolor="none" if name in panel.get("hollow", ()) else look["color"])
            if at is not None:
                axes.axvline(at, **{**look, "linewidth": 0.6})
        if "x" in panel.get("log", ""):
            axes.set_xscale("log")
            low, high = axes.get_xlim()  # few labels, which don't overlap: 200M, 500M, 1G
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e4 * low else (1,)))
            axes.xaxis.set_major_formatter(billions := EngFormatter(sep=""))
            billions.ENG_PREFIXES = {**EngFormatter.ENG_PREFIXES, 9: "B"}  # as tables say of tokens and parameters
            axes.xaxis.set_minor_formatter(NullFormatter())
        elif isinstance(axes.xaxis.get_major_locator(), AutoLocator):  # names as x have their own
            axes.xaxis.set_major_locator(MaxNLocator(7, steps=(1, 2, 5, 10), integer=panel.get("whole", False)))
        if "y" in panel.get("log", ""):
            axes.set_yscale("log")
        if panel.get("whole"):
            axes.xaxis.get_major_locator().set_params(integer=True)
        words = names and any(isinstance(x, str) for xs, _ in panel["series"][names[0]] for x in xs)
        labels = axes.get_legend_handles_labels()[1]
        if len(labels) > LEGEND:
            across = max(1, int(14 * width / columns) // (max(map(len, labels)) + 6))  # letters of a line, and of an entry
            lines[number // columns] = max(lines[number // columns], math.ceil(len(labels) / across) + (2 if words else 0))
            below = ScaledTranslation(0, -1.2 if words else -0.6, figure.dpi_scale_trans)  # inches, for the ticks' labels
            axes.legend(fontsize=8, ncols=across, loc="upper center", bbox_to_anchor=(0.5, 0),
                        bbox_transform=axes.transAxes + below)
        elif names:
            axes.legend(fontsize=8, framealpha=0.5)  # a line beneath shows through
        if words:
            axes.tick_params(axis="x", labelrotation=30)  # names take more room than numbers
        axes.set_xlabel(panel["x"])
        axes.set_ylabel(panel["y"])
        axes.set_title(panel.get("title", ""), fontsize=10)
    figure.set_figheight(figure.get_figheight() + 0.19 * sum(lines))  # the axes keep their room
    figure.suptitle(title)
    if caption:
        figure.supxlabel("\n".join(textwrap.fill(line, int(14 * width)) for line in caption.splitlines()), fontsize=9)
    figure.savefig(path)


def curves(path, series, x, y, title, caption=""):
    """One panel of series = {name: [(xs, ys), ...]} around zero."""
    draw(path, [dict(series=series, x=x, y=y, zero=True)], title, caption)
