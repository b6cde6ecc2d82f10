"""Pictures. Imports nothing of the project."""
import matplotlib

matplotlib.use("Agg")  # files only: no screen is needed
from matplotlib.figure import Figure  # noqa: E402


def curves(path, series, x, y, title, caption=""):
    """
    A picture of series = {name: [(xs, ys), ...]}, one line per repetition (seed) in the name's colour.
    x, y: names and units of the axes; caption: what to look for.
    """
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="0.5", linewidth=1)
    for i, (name, lines) in enumerate(series.items()):
        for j, (xs, ys) in enumerate(lines):
            axes.plot(xs, ys, color=f"C{i % 10}", label=name if j == 0 else None, linewidth=1.2)
    if series:
        axes.legend()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    if caption:
        figure.supxlabel(caption, fontsize=9)
    figure.savefig(path)
