"""A matplotlib figure as SVG inside an HTML page: small, in the page's colours and fonts, marked for its script."""

import io
import re
import warnings
from html import escape

from matplotlib import rc_context
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from fedobp.report.figures import CELL, COLOURS, GRID, INK, MUTED, PALE, RAMP, STYLE

# Colours by the page's names for them, which differ in light and dark.
NAMES = {
    INK: "--ink", MUTED: "--muted", PALE: "--pale", GRID: "--grid", CELL: "--cell",
    **{colour: f"--c{at}" for at, colour in enumerate(COLOURS)},
    **{colour: f"--l{at}" for at, colour in enumerate(RAMP)},
}  # fmt: skip
_NUMBER = r'"(-?[\d.]+)"'
_DIGITS = re.compile(r"(\d\.\d\d)\d+")  # a hundredth of a point is enough
_MARKERS = re.compile(
    r'<g id="dots(\d+)([rs])(\S+)">\s*<defs>.*?</defs>\s*<g[^>]*>((?:\s*<use [^>]*/>)*)\s*</g>\s*</g>', re.DOTALL
)


def inline_svg(figure: Figure, name: str, alt: str) -> str:
    """Return a figure as an SVG element with an alternative text; `name` tells its ids from those of other figures.

    An artist whose gid is `m3` or `s3` gets the attribute `data-m="3"`, by which the script finds what belongs to a
    group; `s` also `data-s`: its points or itself can be pointed at. `dots3r2.5` are markers without an outline, round
    (r) or square (s), 2.5 points wide: they become one path, of 15 bytes a dot.
    """
    content = io.StringIO()
    with rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has other fonts
        figure.patch.set_visible(False)
        for ax in figure.axes:
            ax.patch.set_visible(to_hex(ax.get_facecolor()) == CELL)
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    text = content.getvalue()
    text = re.sub(
        r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL
    )
    [box] = re.findall(r'viewBox="([^"]*)"', text)
    text = text[text.index(">") + 1 :]
    text = _MARKERS.sub(_dots, text)
    text = re.sub(r' id="([ms])(\d+)"', lambda at: f' data-m="{at[2]}"' + (" data-s" if at[1] == "s" else ""), text)
    text = text.replace(' id="cells"', " data-cells")
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
    kept = {one for pair in used for one in pair if one}
    text = re.sub(r' id="([^"]*)"', lambda at: f' id="{name}-{at[1]}"' if at[1] in kept else "", text)
    text = re.sub(r"(url\(#|href=\"#)", rf"\1{name}-", text).replace("xlink:href", "href")
    text = re.sub(r"#[0-9a-f]{6}\b(?=[;\"])", lambda at: f"var({NAMES[at[0]]})" if at[0] in NAMES else at[0], text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"<[^>]*>", lambda tag: _DIGITS.sub(r"\1", tag[0]), text)  # in what is drawn, not in labels
    text = re.sub(r">\s+<", "><", text).strip()
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(alt)}">{text}'


def _dots(found: re.Match[str]) -> str:
    index, shape, width, uses = found.groups()
    points = re.findall(rf"x={_NUMBER} y={_NUMBER}", uses)
    path = "".join(f"M{float(x):.1f} {float(y):.1f}h0" for x, y in points)
    [colour] = set(re.findall(r"fill: (#\w+)", uses))
    cap = "round" if shape == "r" else "square"
    return (
        f'<path data-m="{index}" data-dots="" d="{path}" '
        f'style="fill: none; stroke: {colour}; stroke-width: {float(width):.2f}; stroke-linecap: {cap}"/>'
    )
