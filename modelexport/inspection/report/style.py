"""The page's style sheet: no font, picture or script but what the browser has. Light, dark, narrow and on paper."""

from __future__ import annotations

__all__ = ["HEAT_STEPS", "QUANTISED_COLOURS", "STYLE"]

HEAT_STEPS = 7
"""Classes ``h0`` (least error) to ``h6``: one hue, lightness in one direction, so that it needs no colour vision.

An odd number: what is equal but for noise is all in the middle one.
"""
QUANTISED_COLOURS = 6
"""Classes ``c1`` to ``c6``, for number formats that are quantised; ``c0`` is for the others."""

_LIGHT = """
color-scheme:light dark;
--page:#fcfcfb;--raised:#f3f4f4;--ink:#1b1f23;--muted:#5d656e;--line:#dfe2e5;--link:#1f57a8;
--c0:#87909a;--c1:#2f6fbb;--c2:#12917c;--c3:#8058b0;--c4:#c0567f;--c5:#b0821a;--c6:#5b6b2f;
--h0:#fdf4e9;--h1:#fbe4c8;--h2:#f8ce9b;--h3:#f0a95f;--h4:#de8138;--h5:#b04f1b;--h6:#853713;
--on-low:#1b1f23;--on-high:#ffffff;--alert:#9a3412;--alert-page:#fdf3ec;
"""
_DARK = """
--page:#15181b;--raised:#1f2327;--ink:#e7e9eb;--muted:#a0a8b0;--line:#30363c;--link:#8ab4f8;
--c0:#6c757f;--c1:#5a97e0;--c2:#2fb59c;--c3:#a984d8;--c4:#dd7ba2;--c5:#d6aa48;--c6:#93a85c;
--h0:#24272b;--h1:#352b22;--h2:#523a23;--h3:#754c25;--h4:#c07a34;--h5:#d98d40;--h6:#fbae5e;
--on-low:#e7e9eb;--on-high:#15181b;--alert:#f5a97f;--alert-page:#2a211c;
"""
_PAGE = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);line-height:1.5;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;font-size:16px}
main,header,footer{max-width:66rem;margin:0 auto;padding:0 1.5rem}
header{padding-top:2.75rem}
h1{font-size:2rem;line-height:1.2;margin:0 0 .5rem;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{font-size:1.3rem;margin:3rem 0 .35rem;letter-spacing:-.01em}
h3{font-size:1rem;margin:1.75rem 0 .35rem}
p{margin:.35rem 0 .9rem;max-width:46rem}
.lede{font-size:1.1rem;color:var(--muted);overflow-wrap:anywhere}
.note{color:var(--muted);font-size:.9rem}
code,.name{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;font-size:.875em;
overflow-wrap:anywhere;unicode-bidi:isolate}
a{color:var(--link);text-underline-offset:.15em}
nav{margin:1.5rem 0 0;display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;font-size:.9rem}
footer{margin-top:4rem;padding-top:1rem;padding-bottom:3rem;color:var(--muted);font-size:.85rem}
footer p{border-top:1px solid var(--line);padding-top:1rem;max-width:none}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(11.5rem,1fr));gap:.75rem;margin:1.75rem 0 0;padding:0}
.tiles>div{background:var(--raised);border-radius:.5rem;padding:.8rem 1rem .75rem;min-width:0}
.tiles dt{color:var(--muted);font-size:.85rem}
.tiles dd{margin:0;font-size:1.6rem;line-height:1.25;letter-spacing:-.01em;font-variant-numeric:tabular-nums}
.tiles dd.sub{font-size:.82rem;line-height:1.4;letter-spacing:0;color:var(--muted);margin-top:.2rem;
overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:.75rem 0}
.scroll:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
table.wide{width:100%}
th,td{padding:.32rem .75rem;text-align:right;vertical-align:middle;white-space:nowrap;font-weight:400}
th:first-child,td:first-child{text-align:left;padding-left:0}
th:last-child,td:last-child{padding-right:0}
thead th{color:var(--muted);font-size:.82rem;border-bottom:1px solid var(--line);vertical-align:bottom}
tbody th,tbody td{border-bottom:1px solid var(--line)}
td.left,th.left{text-align:left}
td.long{white-space:normal;overflow-wrap:anywhere;text-align:left}
td.bar{width:40%;min-width:9rem}
svg{display:block;width:100%;overflow:visible}
svg text{fill:var(--muted);font-size:12px;font-family:inherit}
.grid{stroke:var(--line)}
.base{stroke:var(--muted)}
.bars{fill:var(--c1)}
.link{stroke:var(--muted);stroke-width:2}
.before{fill:var(--page);stroke:var(--c0);stroke-width:2}
.after{fill:var(--c1)}
.key{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;font-size:.85rem;color:var(--muted);margin:.5rem 0;padding:0;
list-style:none;align-items:center}
.mark{display:inline-block;width:12px;height:12px;margin-right:.35rem;vertical-align:-.1em}
.swatch{display:inline-block;width:.8rem;height:.8rem;border-radius:.15rem;margin-right:.4rem;vertical-align:-.08em}
.ramp{display:inline-flex;margin:0 .5rem;vertical-align:-.12em}
.ramp i{width:1.2rem;height:.85rem}
table.heat{border-collapse:separate;border-spacing:1px;font-size:.8rem}
table.heat th,table.heat td{border:0;padding:.2rem .1rem}
table.heat td{text-align:center;height:1.65rem}
table.heat td{padding:0;min-width:5px}
table.heat.few td{min-width:2.9rem}
table.heat thead th{text-align:left;font-size:.75rem;padding:.1rem;white-space:nowrap;overflow:visible;max-width:0}
table.heat.few thead th{text-align:center;max-width:none}
table.heat th.row{position:sticky;left:0;background:var(--page);text-align:left;padding:.1rem .9rem .1rem 0;
max-width:none;width:1%;white-space:nowrap;font-size:.8rem}
table.heat thead th.row{font-size:.75rem;text-align:right;padding-right:.4rem}
table.heat td.sum,table.heat thead th.sum{padding-left:.8rem;text-align:right;max-width:none;min-width:3.2rem;width:1%}
.spread{display:grid;grid-template-columns:minmax(9rem,14rem) 1fr minmax(11rem,14rem);gap:.35rem 1.25rem;
align-items:center;margin-top:1rem;font-size:.9rem}
.spread .figures{color:var(--muted);font-size:.82rem;line-height:1.35;font-variant-numeric:tabular-nums}
.spread .figures b{color:var(--ink);font-weight:400}
.spread .axis{grid-column:2}
.sizes{display:flex;flex-wrap:wrap;gap:.5rem;padding:0;margin:.75rem 0;list-style:none}
.sizes li{background:var(--raised);border-radius:.4rem;padding:.3rem .85rem;font-variant-numeric:tabular-nums}
.alerts{padding:.25rem 1.25rem;margin:.75rem 0;background:var(--alert-page);border-left:3px solid var(--alert);
border-radius:0 .4rem .4rem 0;list-style:none;overflow-wrap:anywhere}
.alerts li{margin:.6rem 0}
.alerts b{color:var(--alert);font-weight:600}
.plain{padding-left:1.1rem;overflow-wrap:anywhere}
.plain li{margin:.3rem 0}
.pairs{display:grid;grid-template-columns:repeat(auto-fit,minmax(17rem,1fr));gap:0 3rem}
.pairs>*{min-width:0}
.pairs td.long{text-align:left}
.pairs tbody th{color:var(--muted)}
.pairs table{width:100%}
blockquote{margin:.5rem 0;padding-left:1rem;border-left:3px solid var(--line);overflow-wrap:anywhere}
details{margin:.75rem 0}
summary{cursor:pointer;color:var(--link);font-size:.9rem}
@media (max-width:44rem){
main,header,footer{padding-left:1rem;padding-right:1rem}
header{padding-top:1.5rem}
h1{font-size:1.6rem}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}
.tiles dd{font-size:1.35rem}
.spread{grid-template-columns:1fr;gap:.1rem}
.spread .axis{grid-column:1}
.spread .figures{margin-bottom:.8rem}
th,td{padding:.3rem .5rem}
td.bar{min-width:6.5rem}
}
@media print{
:root{--page:#fff}
body{font-size:10.5pt}
nav{display:none}
h2,h3{break-after:avoid}
tr,.tiles>div,.spread>*{break-inside:avoid}
.scroll{overflow:visible}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
details::details-content{content-visibility:visible;display:block}
}
"""


def _classes() -> str:
    colours = (f".c{n}{{fill:var(--c{n});background-color:var(--c{n})}}" for n in range(QUANTISED_COLOURS + 1))
    # Text on them: the page's ink on the steps next to the page, dark ink in the middle, and the page's colour last.
    inks = {HEAT_STEPS - 3: "#1b1f23", HEAT_STEPS - 2: "var(--on-high)", HEAT_STEPS - 1: "var(--on-high)"}
    heat = (f".h{n}{{background:var(--h{n});color:{inks.get(n, 'var(--on-low)')}}}" for n in range(HEAT_STEPS))
    return "".join((*colours, *heat))


STYLE = (
    f":root{{{_LIGHT}}}@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}{_PAGE}{_classes()}"
).replace("\n", "")
