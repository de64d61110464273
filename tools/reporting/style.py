"""The style of every figure."""

from __future__ import annotations

# Okabe and Ito (2008): told apart by every kind of colour vision, and in print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F", "#000000")
STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "savefig.bbox": "tight",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "pdf.fonttype": 42,
}
