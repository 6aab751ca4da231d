# SPDX-License-Identifier: Apache-2.0
"""The three kinds of plot that the report has, as SVG text: bars, curves over a logarithmic grid, intervals in lanes."""
import math
from html import escape

COLORS = ("#2a6fbb", "#d9822b", "#3a9a5b", "#7d5ba6", "#b8405e", "#6b7280")
INK, FAINT = "#1f2937", "#d1d5db"
WIDTH = 860


def text(x, y, words, anchor="start", size=12, color=INK):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{escape(str(words))}</text>'


def line(x1, y1, x2, y2, color=FAINT, width=1.0, dash=""):
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"{dashes}/>'


def rectangle(x, y, width, height, color, title="", opacity=1.0):
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.3):.2f}" height="{height:.1f}" fill="{color}" '
            f'fill-opacity="{opacity}">{inside}</rect>')  # fmt: skip


def document(height, title, parts):
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" '
            'font-family="system-ui, sans-serif" role="img">')  # fmt: skip
    return "\n".join([head, f"<title>{escape(title)}</title>", rectangle(0, 0, WIDTH, height, "#ffffff"),
                      text(12, 22, title, size=15), *parts, "</svg>"])  # fmt: skip


def figure(value):
    """A number of three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def bars(title, rows, mark=None, unit=""):
    """@param rows  [(label, value, colour's index)]; @param mark  a value that deserves a line through all bars."""
    left, top, step = 330, 40, 22
    most = max([value for _, value, _ in rows] + [mark or 0]) or 1
    scale = (WIDTH - left - 90) / most
    parts = []
    for i, (label, value, color) in enumerate(rows):
        y = top + i * step
        parts += [text(left - 8, y + 13, label, "end"),
                  rectangle(left, y, value * scale, step - 6, COLORS[color % len(COLORS)], f"{label}: {figure(value)}{unit}"),
                  text(left + max(value, mark or 0) * scale + 6, y + 13, figure(value) + unit)]  # fmt: skip
    bottom = top + len(rows) * step
    if mark:
        parts += [line(left + mark * scale, top - 6, left + mark * scale, bottom, INK, 1, "4 3")]
    return document(bottom + 14, title, parts)


def ticks(least, most):
    """Powers of ten, with 2 and 5 between where there are few."""
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    factors = (1, 2, 5) if high - low <= 3 else (1,)
    return [f * 10.0**e for e in range(low, high + 1) for f in factors if least <= f * 10.0**e <= most]


def curves(title, series, x_label, y_label):
    """Both axes logarithmic. @param series  [(name, [(x, y)])], y above 0."""
    left, right, top, height = 70, 170, 56, 230
    points = [point for _, line_points in series for point in line_points]
    xs = sorted({x for x, _ in points})
    low, high = min(y for _, y in points) / 1.3, max(y for _, y in points) * 1.3
    span = math.log(xs[-1] / xs[0]) or 1

    def at(x, y):
        across = math.log(x / xs[0]) / span if len(xs) > 1 else 0.5
        return left + across * (WIDTH - left - right), top + height * (1 - math.log(y / low) / math.log(high / low))

    parts = []
    for y in ticks(low, high):
        parts += [line(left, at(xs[0], y)[1], WIDTH - right, at(xs[0], y)[1]), text(left - 8, at(xs[0], y)[1] + 4, figure(y), "end")]
    for x in xs:
        parts += [text(at(x, low)[0], top + height + 18, f"{x:g}", "middle")]
    ends = []
    for i, (name, line_points) in enumerate(series):
        color = COLORS[i % len(COLORS)]
        places = [at(x, y) for x, y in sorted(line_points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts += [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>']
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        ends.append((places[-1][1], name, color))
    free = top
    for y, name, color in sorted(ends):  # names stand beside their curves, apart from one another
        y = max(y, free)
        free = y + 15
        parts += [text(WIDTH - right + 10, y + 4, name, color=color)]
    parts += [text((left + WIDTH - right) / 2, top + height + 36, x_label, "middle"), text(left - 8, top - 8, y_label, "end")]
    return document(top + height + 46, title, parts)


def lanes(title, rows, begin, end):
    """Intervals over time. @param rows  [(lane, [(begin, end, parity, tip)])] in ms."""
    left, top, step = 110, 40, 30
    scale = (WIDTH - left - 20) / ((end - begin) or 1)
    parts = []
    for i, (lane, intervals) in enumerate(rows):
        y = top + i * step
        parts += [text(left - 8, y + 16, lane, "end"), line(left, y + step - 4, WIDTH - 20, y + step - 4)]
        for first, last, parity, tip in intervals:
            parts.append(rectangle(left + (first - begin) * scale, y, (last - first) * scale, step - 8, COLORS[i % len(COLORS)], tip,
                                   0.95 if parity else 0.6))  # fmt: skip
    bottom = top + len(rows) * step
    for i in range(6):
        time = begin + (end - begin) * i / 5
        parts += [text(left + (time - begin) * scale, bottom + 14, f"{time - begin:.4g} ms", "end" if i == 5 else "middle", 11)]
    return document(bottom + 26, title, parts)
