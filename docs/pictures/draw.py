"""Draw the documentation's pictures, as SVG: `python docs/pictures/draw.py` writes them beside it.

`method.svg` shows how LRKV makes a head's key and what each variant caches; its bars are computed
from the configurations. `rope.svg` shows what RoPE rotates in each mode.
"""

from __future__ import annotations

from pathlib import Path

from lrkv_jax.config import load_config
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token

HERE = Path(__file__).parent
INK, GREY, LINE = "#1f2328", "#59636e", "#8c959f"
SHARED, PRIVATE, PLAIN = "#0969da", "#bc4c00", "#d1d9e0"
FONT = "font-family='Helvetica, Arial, sans-serif'"


def text(x, y, words, *, size=14, fill=INK, anchor="start", weight="normal", style="normal"):
    return (
        f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{fill}' text-anchor='{anchor}' "
        f"font-weight='{weight}' font-style='{style}' {FONT}>{words}</text>"
    )


def box(x, y, width, height, *, fill="white", stroke=LINE, radius=4, dash=None):
    dashed = f" stroke-dasharray='{dash}'" if dash else ""
    return (
        f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{radius}' "
        f"fill='{fill}' stroke='{stroke}'{dashed}/>"
    )


def arrow(x1, y1, x2, y2, *, stroke=GREY):
    line = f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{stroke}'"
    return f"{line} stroke-width='1.5' marker-end='url(#tip)'/>"


def picture(width, height, title, parts) -> str:
    """An SVG on a white ground, so that it reads on light and on dark pages."""
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"width='{width}' height='{height}' role='img' aria-label='{title}'>"
        f"<title>{title}</title><defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' "
        f"markerWidth='7' markerHeight='7' orient='auto'><path d='M0 0L8 4L0 8z' fill='{GREY}'/>"
        "</marker></defs>"
    )
    ground = f"<rect width='{width}' height='{height}' rx='8' fill='white'/>"
    return "\n".join([head, ground, *parts, "</svg>\n"])


def cache_shares() -> dict[str, tuple[int, float]]:
    """Bytes that one token takes in one layer's cache at 128M, and the share of MHA's.

    In bfloat16, as allocated: inverse norms and padding included.
    """
    models = {
        name: load_config("128m", [f"attention={name}"]).model
        for name in ("mha", "lrkv", "gqa", "mqa", "mla")
    }
    each = {n: cache_allocated_bytes_per_token(m) // m.layers for n, m in models.items()}
    return {name: (size, size / each["mha"]) for name, size in each.items()}


def method() -> str:
    parts = [
        text(24, 34, "One layer of LRKV: keys (values are made the same way)", size=16,
             weight="bold"),
        text(24, 190, "x", size=20, style="italic"),
        text(24, 208, "one token", size=11, fill=GREY),
        # The shared part.
        arrow(46, 176, 118, 104), box(122, 76, 92, 52, stroke=SHARED),
        text(168, 100, "W", size=18, anchor="middle", style="italic", fill=SHARED),
        text(168, 118, "D × K", size=11, anchor="middle", fill=GREY),
        arrow(216, 102, 262, 102), box(266, 84, 132, 36, fill="#ddf4ff", stroke=SHARED),
        text(332, 107, "x W", size=14, anchor="middle", fill=SHARED),
        text(266, 76, "shared by all heads: K values", size=12, fill=SHARED),
        # The residuals.
        arrow(46, 190, 118, 214), box(130, 206, 92, 52, stroke=PRIVATE),
        box(126, 198, 92, 52, stroke=PRIVATE), box(122, 190, 92, 52, stroke=PRIVATE),
        text(168, 214, "U<tspan dy='4' font-size='11'>h</tspan>", size=18, anchor="middle",
             style="italic", fill=PRIVATE),
        text(168, 233, "D × R", size=11, anchor="middle", fill=GREY),
        arrow(224, 222, 262, 222), box(274, 210, 54, 36, fill="#fff1e5", stroke=PRIVATE),
        box(270, 206, 54, 36, fill="#fff1e5", stroke=PRIVATE),
        box(266, 202, 54, 36, fill="#fff1e5", stroke=PRIVATE),
        text(293, 225, "x U<tspan dy='3' font-size='9'>h</tspan>", size=13, anchor="middle",
             fill=PRIVATE),
        text(266, 194, "private: R values for each of H heads", size=12, fill=PRIVATE),
        # What is cached.
        box(254, 52, 242, 206, fill="none", stroke=GREY, dash="5 4", radius=8),
        text(488, 276, "cached, once per token", size=12, anchor="end", fill=GREY),
        # A head's key.
        arrow(400, 102, 588, 146), arrow(330, 222, 518, 222),
        box(522, 200, 64, 44, stroke=PRIVATE),
        text(554, 219, "B<tspan dy='3' font-size='10'>h</tspan><tspan dy='-9' font-size='10'>T"
             "</tspan>", size=15, anchor="middle", style="italic", fill=PRIVATE),
        text(554, 237, "R × K", size=11, anchor="middle", fill=GREY),
        arrow(570, 198, 596, 172),
        f"<circle cx='602' cy='158' r='13' fill='white' stroke='{GREY}'/>",
        text(602, 164, "+", size=18, anchor="middle"), arrow(617, 158, 640, 158),
        text(648, 153, "the key of head h", size=14, weight="bold"),
        text(648, 172, "x W + (x U<tspan dy='3' font-size='10'>h</tspan><tspan dy='-3'>) B</tspan>"
             "<tspan dy='3' font-size='10'>h</tspan><tspan dy='-9' font-size='10'>T</tspan>",
             size=14),
        text(648, 192, "is never stored: attention", size=12, fill=GREY),
        text(648, 208, "works on the two cached parts", size=12, fill=GREY),
    ]  # fmt: skip
    y = 316
    parts.append(
        text(24, y, "Bytes per token and layer in the cache, 128M configuration", size=14,
             weight="bold")
    )  # fmt: skip
    parts.append(
        text(24, y + 18, "bfloat16, as allocated: norms and padding included", size=12, fill=GREY)
    )
    for name, (size, share) in cache_shares().items():
        y += 30
        width = 560 * share
        fill = PRIVATE if name == "lrkv" else PLAIN
        if name == "lrkv":  # its shared part and its residuals
            parts += [box(90, y, width, 20, fill="#fff1e5", stroke=PRIVATE, radius=2)]
            shared = 560 * (2 * 128 * 2) / 3072
            parts += [box(90, y, shared, 20, fill="#ddf4ff", stroke=SHARED, radius=2)]
        else:
            parts += [box(90, y, width, 20, fill=fill, radius=2)]
        parts += [
            text(82, y + 15, name.upper(), size=13, anchor="end"),
            text(98 + width, y + 15, f"{size:,} bytes, {share:.1%}", size=13),
        ]
    return picture(860, 500, "How LRKV makes and caches the keys of a layer", parts)


ROTATED, UNROTATED = "#ddf4ff", "white"
# Mode, boxes (what, width, rotated), what the query meets them with, what that costs.
MODES = (
    ("LRKV full", (("k shared", 150, True), ("r", 60, False)),
     "q, and M(q), which carries RoPE across B", "the most arithmetic", "the paper's"),
    ("LRKV latent", (("k shared", 150, True), ("r", 60, True)),
     "q, and q B rotated in R dimensions", "next to no arithmetic", "lowest loss here"),
    ("LRKV shared", (("k shared", 150, True), ("r", 60, False)),
     "q, and q B before its rotation", "next to no arithmetic", "printed equations hold"),
    ("MLA decoupled", (("c", 150, False), ("rope key", 60, True)),
     "q W, and a second query that is rotated", "next to no arithmetic", "DeepSeek's"),
    ("MLA full", (("c", 150, False),),
     "M(q), which carries RoPE across W", "the most arithmetic", "no rope key"),
)  # fmt: skip


def rope() -> str:
    y = 34
    parts = [
        text(24, y, "What RoPE rotates, by mode", size=16, weight="bold"),
        box(560, y - 13, 26, 16, fill=ROTATED, stroke=SHARED, radius=2),
        text(594, y, "cached rotated", size=12, fill=GREY),
        box(704, y - 13, 26, 16, fill=UNROTATED, stroke=PRIVATE, radius=2),
        text(738, y, "cached unrotated", size=12, fill=GREY),
        text(24, y + 30, "mode", size=12, fill=GREY),
        text(150, y + 30, "cached for a key", size=12, fill=GREY),
        text(400, y + 30, "what the query brings", size=12, fill=GREY),
        text(690, y + 30, "decoding", size=12, fill=GREY),
    ]
    for name, boxes, query, cost, note in MODES:
        y += 56
        parts += [text(24, y + 18, name, weight="bold"), text(24, y + 34, note, size=11, fill=GREY)]
        x = 150
        for what, width, rotated in boxes:
            fill, stroke = (ROTATED, SHARED) if rotated else (UNROTATED, PRIVATE)
            parts.append(box(x, y + 2, width, 28, fill=fill, stroke=stroke))
            label = text(x + width / 2, y + 21, what, size=13, anchor="middle", fill=stroke)
            parts.append(label)
            x += width + 8
        parts += [text(400, y + 21, query, size=13), text(690, y + 21, cost, size=13)]
    parts.append(
        text(24, y + 66, "r: a head's latent, R wide. c: the latent of all heads. B, W: the factors"
             " that make keys from them. Values are never rotated.", size=12, fill=GREY)
    )  # fmt: skip
    return picture(860, y + 84, "What RoPE rotates in each mode of LRKV and MLA", parts)


PICTURES = {"method.svg": method, "rope.svg": rope}


def main() -> None:
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
